"""Exports of transformers' models by a process without torch, like the master."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slurmrl.config.schema import Lora
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models import hf_form
from slurmrl.models.hf_adapters import adapter_shapes
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_files import file_form
from slurmrl.models.hf_loading import tensor_specs
from slurmrl.workers.master.exporting import export_step
from tests.support.committed import CommittedTrial
from tests.support.families import tiny

EXPORT = """
import sys
from pathlib import Path
from slurmrl.run.paths import RunPaths
from slurmrl.workers.master.exporting import export_step
run, target, form = sys.argv[1:]
paths = RunPaths(Path(run))
print(export_step(paths, "actor", 4, Path(target), form=form or None).folder)
loaded = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"{loaded} is imported" if loaded else 0)
"""
"""The program of the process."""
FAMILIES = ("qwen3_moe", "gpt2")
"""Files with parts of stacked parameters, and with transposed matrices."""


def exported(trial: CommittedTrial, target: Path, form: str) -> None:
    """Export step 4 in another process."""
    command = [sys.executable, "-c", EXPORT, str(trial.paths.run), str(target), form]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_does_not_import_torch_into_its_process(tmp_path: Path, family: str) -> None:
    """The files are the files of a process with torch."""
    values = tiny(family)
    trial = CommittedTrial(tmp_path, architecture=values, implementation="hf")
    generator = np.random.default_rng(1)
    shapes, _ = tensor_specs(HFConfig.from_hf(values), "lm")
    trial.commit(4, {n: generator.normal(size=s).astype("<f4") for n, s in shapes.items()})
    exported(trial, tmp_path / "other", "")
    own = export_step(trial.paths, "actor", 4, tmp_path / "own").folder
    assert files(own) == files(tmp_path / "other")
    AutoModelForCausalLM.from_pretrained(own)


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_export_of_adapters_imports_no_torch(tmp_path: Path, form: str) -> None:
    values, lora = tiny("qwen3"), {"rank": 2, "targets": ["q_proj", "down_proj"]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    model.save_pretrained(tmp_path / "base")
    actor = {"path": str(tmp_path / "base"), "implementation": "hf", "lora": lora}
    trial = CommittedTrial(tmp_path / "runs", **actor)
    shapes = adapter_shapes(values, "lm", Lora.model_validate(lora))
    generator = np.random.default_rng(1)
    trial.commit(4, {n: generator.normal(size=s).astype("<f4") for n, s in shapes.items()})
    exported(trial, tmp_path / "other", form)
    own = export_step(trial.paths, "actor", 4, tmp_path / "own", form=form).folder
    assert files(own) == files(tmp_path / "other")


def test_file_layout_from_a_child_process_equals_the_local_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a family that cannot be exported, both give the same error message."""
    known = HFConfig.from_hf(tiny("qwen3_moe"))
    unknown = HFConfig.from_hf({"model_type": "no_such_family"})
    wanted = file_form(known, "lm")
    with pytest.raises(UsageError) as refused:
        file_form(unknown, "lm")
    monkeypatch.delitem(sys.modules, "torch")
    assert hf_form.file_form(known, "lm") == wanted
    with pytest.raises(UsageError) as found:
        hf_form.file_form(unknown, "lm")
    assert str(found.value) == str(refused.value)


@pytest.mark.parametrize(
    ("family", "stated", "layer"),
    [
        ("glm4_moe", {"num_nextn_predict_layers": 1}, "model.layers.2."),
        ("qwen3_next", {}, "mtp.layers.0."),
    ],
)
def test_export_keeps_layers_that_predict_more_tokens(
    tmp_path: Path, family: str, stated: dict[str, Any], layer: str
) -> None:
    values = tiny(family, **stated)
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(source)
    held = load_file(source / "model.safetensors")
    own = {f"{layer}{name}": torch.randn(3, 2).bfloat16() for name in ("eh_proj.weight", "norm")}
    save_file({**held, **own}, source / "model.safetensors", {"format": "pt"})
    trial = CommittedTrial(tmp_path / "runs", path=str(source), implementation="hf")
    shapes, constants = tensor_specs(HFConfig.from_hf(values), "lm")
    sizes = shapes | {name: spec.shape for name, spec in constants.items()}
    trial.commit(4, {name: np.ones(size, "<f4") for name, size in sizes.items()})

    target = export_step(trial.paths, "actor", 4, tmp_path / "own").folder

    found = load_file(target / "model.safetensors")
    assert found.keys() == held.keys() | own.keys()
    for name, tensor in own.items():
        assert torch.equal(found[name], tensor)
    assert AutoModelForCausalLM.from_pretrained(target).num_parameters() > 0


@pytest.mark.parametrize("stated", [{}, {"num_nextn_predict_layers": 1}])
def test_export_needs_initial_weights_only_for_mtp_layers(
    tmp_path: Path, stated: dict[str, Any]
) -> None:
    values = tiny("glm4_moe" if stated else "qwen3", **stated)
    source = tmp_path / "source"
    AutoConfig.for_model(**values).save_pretrained(source)
    trial = CommittedTrial(tmp_path / "runs", path=str(source), implementation="hf")
    shapes, constants = tensor_specs(HFConfig.from_hf(values), "lm")
    sizes = shapes | {name: spec.shape for name, spec in constants.items()}
    trial.commit(4, {name: np.ones(size, "<f4") for name, size in sizes.items()})

    if stated:
        with pytest.raises(UsageError, match=r"neither model\.safetensors"):
            export_step(trial.paths, "actor", 4, tmp_path / "own")
    else:
        target = export_step(trial.paths, "actor", 4, tmp_path / "own").folder
        assert load_file(target / "model.safetensors")


def test_file_layout_fails_if_transformers_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master retries other errors without limit, so the trial would never end."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(hf_form, "MODULE", "slurmrl.models.no_such_module")
    known = HFConfig.from_hf({"model_type": "qwen3", "hidden_size": 32})
    with pytest.raises(RunFailedError, match=r"transformers failed: .*No module named"):
        hf_form.file_form(known, "lm")
