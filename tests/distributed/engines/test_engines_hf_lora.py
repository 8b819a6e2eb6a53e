"""Adapters of transformers' models on the fsdp engine, on one rank and on two."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurmrl.config.schema.roles import Lora
from slurmrl.models.adapters import write_adapter
from slurmrl.models.hf_config import MODULE, HFConfig, stored
from slurmrl.models.hf_merged import MergedFolder
from slurmrl.models.hf_targets import TRANSPOSED
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.layout import Box
from tests.distributed.engines.cases import ARCHITECTURE, Setup, model
from tests.distributed.engines.test_engines_hf_tensor import assert_trains_alike, saved_tensors
from tests.distributed.engines.test_engines_layouts import setup_of
from tests.distributed.engines.test_engines_lora import outputs_of
from tests.pool import RankError, RankPool
from tests.support import families

CASES = "tests.distributed.engines.cases"
LORA_CASES = "tests.distributed.engines.lora_cases"
BOUND = 1e-5
STEP_BOUND = 1e-4
"""Bound for weights: a step divides gradients by their size, so it magnifies their rounding."""
FAMILIES = ("gpt2", "gpt_oss", "nemotron_h")
"""Transposed weights; experts and constants; names in files that differ from the model's."""


def tiny_model(family: str, folder: Path, seed: int = 0) -> None:
    """Save a model with the vocabulary of the batches."""
    families.tiny_model(family, folder, seed, vocab_size=ARCHITECTURE["vocab_size"])


def setup(
    folder: Path, ranks: int, head: str = "lm", *, tensor_ranks: int = 1, **lora: Any
) -> Setup:
    settings = {"rank": 3, "alpha": 5.0, "targets": "all-linear", **lora}
    sizes = {"dp": ranks, "tp": tensor_ranks} if tensor_ranks > 1 else {"dp": ranks}
    one = setup_of(sizes, {}, head=head, layers=ranks > 1)
    values = model(implementation="hf", lora=settings, gradient_checkpointing="full")
    return replace(one, source=folder, model={**values, "architecture": None})


def assert_merged_as_exported(ranks: RankPool, found: Setup, folder: Path) -> set[str]:
    """Compare each rank's merged weights with the export. Return the names of the matrices A."""
    assert found.source is not None
    saved = RoleCheckpoint(folder, "actor")
    names = [name for name, _ in saved.weights()]
    assert names
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
    config = HFConfig.from_hf(json.loads((found.source / "config.json").read_text()))
    merged = MergedFolder(saved, open_folder(found.source), config, "lm", 5 / 3)
    files = dict(merged.weights())
    compared = set()
    for _, _, chunks in ranks(found.ranks, f"{LORA_CASES}:loaded", found, folder):
        for name, begin, chunk in chunks:
            name = name.removeprefix(MODULE)
            if name not in files:
                continue  # with another name or form
            box = Box(begin, tuple(chunk.shape))
            np.testing.assert_array_equal(chunk.numpy(), merged.read(name, box))
            compared.add(f"{MODULE}{name.removesuffix('weight')}lora_A")
    return compared


@pytest.mark.parametrize(
    ("family", "data_ranks", "head", "dropout"),
    [("llama", 1, "lm", 0.4), ("gemma3_text", 2, "lm", 0.0), ("starcoder2", 1, "value", 0.0)],
)
def test_tensor_ranks_train_adapters_as_one_rank(
    ranks: RankPool, tmp_path: Path, family: str, data_ranks: int, head: str, dropout: float
) -> None:
    """Gradients, dropout and merged weights are equal, and checkpoints move between layouts."""
    base = tmp_path / "base"
    families.tiny_model(family, base, vocab_size=34)  # two ranks can have equal parts
    alone = setup(base, 1, head, dropout=dropout)
    split = setup(base, data_ranks, head, tensor_ranks=2, dropout=dropout)
    folder = assert_trains_alike(ranks, tmp_path, alone, split, STEP_BOUND)
    if head == "lm":
        compared, names = (
            assert_merged_as_exported(ranks, split, folder),
            saved_tensors(folder).keys(),
        )
        assert {name for name in names if name.endswith("lora_A") and "/" not in name} == (
            compared & names
        )


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_peft_and_merged_export_compute_as_tensor_ranks(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """Test a dense model, experts, and linear attention, which each rank has whole."""
    base, folder = tmp_path / "base", tmp_path / "checkpoint"
    families.tiny_model(family, base, vocab_size=34)  # two ranks can have equal parts
    folder.mkdir()
    split = setup(base, 1, tensor_ranks=2)
    ranks(2, f"{CASES}:train", split, range(2), save=folder)
    (adapted, frozen, _), *_ = ranks(2, f"{LORA_CASES}:loaded", split, folder)
    saved, lora = RoleCheckpoint(folder, "actor"), Lora(rank=3, alpha=5.0, targets="all-linear")
    values = json.loads((base / "config.json").read_text())
    written = write_adapter(saved, tmp_path / "adapter", lora, "lm", base="base", theirs=values)
    merged = MergedFolder(saved, open_folder(base), HFConfig.from_hf(values), "lm", lora.scale)
    form, _ = file_form(values, "hf", "lm")
    merged_at = export(merged, form, tmp_path / "merged", generation={}, storage=stored)
    whole, exported = (AutoModelForCausalLM.from_pretrained(each) for each in (base, merged_at))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's own
        theirs = peft.PeftModel.from_pretrained(whole, written).eval()
    assert (adapted["logp"] - frozen["logp"]).abs().max() > 1e-3
    with torch.no_grad():
        found = [(outputs_of(each, "lm"), adapted) for each in (theirs, exported.eval())]
        with theirs.disable_adapter():
            found.append((outputs_of(theirs, "lm"), frozen))
    for computed, wanted in found:
        for name, each in wanted.items():
            torch.testing.assert_close(computed[name], each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_as_one_even_after_a_restart(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """Checkpoints have adapters only. Every rank's merged weights have the bits of the export."""
    base = tmp_path / "base"
    tiny_model(family, base)
    (alone, _), *_ = ranks(1, f"{CASES}:train", setup(base, 1), range(3))
    (both, _), *_ = ranks(2, f"{CASES}:train", setup(base, 2), range(3))
    for one, other in zip(alone, both, strict=True):
        assert other == pytest.approx(one, rel=BOUND)
    assert alone[0]["loss"] != alone[2]["loss"]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    ranks(2, f"{CASES}:train", setup(base, 2), range(2), save=folder)
    (rest, _), *_ = ranks(2, f"{CASES}:train", setup(base, 2), range(2, 3), load=folder)
    assert rest == both[2:]

    compared = assert_merged_as_exported(ranks, setup(base, 2), folder)
    saved = RoleCheckpoint(folder, "actor")
    matrices = {name for name, _ in saved.weights() if name.endswith("lora_A")}
    assert family == "nemotron_h" or compared.issuperset(matrices)

    tiny_model(family, base, seed=1)
    with pytest.raises(
        RankError, match=f"weights in actor.path have changed.*was {saved.frozen} and is"
    ):
        ranks(2, f"{CASES}:train", setup(base, 2), range(2, 3), load=folder)


def test_adapter_matrices_are_initialized_as_in_peft(ranks: RankPool, tmp_path: Path) -> None:
    """The matrix after the inputs is random; the other one is zero, also of transposed weights."""
    for family in ("gpt2", "llama"):
        tiny_model(family, tmp_path / family)
        (folder := tmp_path / f"{family}-start").mkdir()
        ranks(1, f"{CASES}:train", setup(tmp_path / family, 1), range(0), save=folder)
        saved = RoleCheckpoint(folder, "actor")
        for name, spec in saved.weights():
            values = torch.from_numpy(saved.read(name))
            first = name.endswith("lora_A") != (family in TRANSPOSED)
            inputs = spec.shape[1 if name.endswith("lora_A") else 0]
            bound = inputs**-0.5 if first else 0.0
            assert values.abs().max() <= bound
            assert bool(values.any()) == first


def test_dropout_does_not_depend_on_the_ranks(ranks: RankPool, tmp_path: Path) -> None:
    tiny_model("gpt2", tmp_path)
    found = {}
    for number in (1, 2):
        dropping = setup(tmp_path, number, dropout=0.4)
        (found[number], _), *_ = ranks(number, f"{CASES}:train", dropping, range(2))
    for one, other in zip(found[1], found[2], strict=True):
        assert other == pytest.approx(one, rel=BOUND)
    (without, _), *_ = ranks(1, f"{CASES}:train", setup(tmp_path, 1), range(2))
    assert abs(without[1]["loss"] - found[1][1]["loss"]) > 1e-3


def test_critic_with_adapters_also_trains_its_value_head(ranks: RankPool, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "checkpoint"
    tiny_model("llama", base)
    folder.mkdir()
    critic = setup(base, 2, "value")
    (both, _), *_ = ranks(2, f"{CASES}:train", critic, range(2), save=folder)
    (alone, _), *_ = ranks(1, f"{CASES}:train", setup(base, 1, "value"), range(2))
    for one, other in zip(alone, both, strict=True):
        assert other == pytest.approx(one, rel=BOUND)
    names = {name for name, _ in RoleCheckpoint(folder, "actor").weights()}
    assert f"{MODULE}score.weight" in names
    assert len(names) == 1 + 2 * 7 * 2
