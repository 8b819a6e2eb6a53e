"""Pinned, merged and fingerprinted weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slurmrl.config.schema import Lora
from slurmrl.engines.role_weights import Fingerprint
from slurmrl.errors import UsageError
from slurmrl.models import model_tensors
from slurmrl.models.adapters import merge, trained_shapes
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import MergedCheckpoint, mismatches, open_folder, read_headers
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.layout import Box, TensorSpec
from slurmrl.workers.master.exporting import export_step, pin_actor
from tests.support.committed import CommittedTrial, Weights
from tests.support.decoder_folders import from_hf, to_hf
from tests.unit.models.conftest import BASE, ODD

LLAMA_ONLY = ("num_key_value_heads", "head_dim")
FAMILIES = ("llama", "qwen2-tied", "gemma", "mixtral", "qwen3_moe-some-dense", "gpt2", "gpt2-odd")


def random(shapes: Any) -> Weights:
    generator = np.random.default_rng(1)
    return {name: generator.normal(size=shape).astype("<f4") for name, shape in shapes.items()}


def compare(trial: CommittedTrial, step: int) -> tuple[Path, Path]:
    """Every tensor and some boxes of the export and the pinned checkpoint of a step."""
    pinned = pin_actor(trial.paths, step)
    exported = export_step(trial.paths, "actor", step, None, dtype="float32").folder
    assert read_headers(pinned) == read_headers(exported)
    generator = np.random.default_rng(2)
    found, expected = open_folder(pinned), open_folder(exported)
    for name, spec in expected.specs().items():
        start = tuple(int(generator.integers(0, size)) for size in spec.shape)
        ends = zip(start, spec.shape, strict=True)
        size = tuple(int(generator.integers(1, stop - a + 1)) for a, stop in ends)
        for box in (Box.whole(spec.shape), Box(start, size)):
            np.testing.assert_allclose(
                found.read(name, box), expected.read(name, box), rtol=1e-6, atol=1e-6
            )
    return pinned, exported


@pytest.mark.parametrize("family", FAMILIES)
def test_pinned_checkpoint_has_the_tensors_of_its_export(tmp_path: Path, family: str) -> None:
    """This holds for all names and forms of tensors in the family's files."""
    values = {**BASE, **ODD[family], "eos_token_id": 3}
    if family.startswith("gpt2"):
        values = {key: value for key, value in values.items() if key not in LLAMA_ONLY}
    config = ModelConfig.from_hf(values)
    trial = CommittedTrial(tmp_path, architecture=values)
    trial.commit(4, random(parameter_shapes(config, "lm")))
    pinned, exported = compare(trial, 4)
    decoders = from_hf(pinned), from_hf(exported)
    for one, other in zip(*(decoder.parameters() for decoder in decoders), strict=True):
        assert torch.equal(one, other)


def test_adapters_are_merged_with_their_own_base_model(tmp_path: Path) -> None:
    """If it is missing, one message names it."""
    base = tmp_path / "base"
    values = {**BASE, "model_type": "llama"}
    config = ModelConfig.from_hf(values)
    AutoModelForCausalLM.from_config(_config(values)).save_pretrained(base)
    lora = {"rank": 3, "alpha": 6, "targets": ["q_proj", "down_proj"]}
    trial = CommittedTrial(tmp_path / "runs", path=str(base), lora=lora)
    adapters = random(trained_shapes(config, "lm", Lora.model_validate(lora)))
    trial.commit(4, adapters)
    pinned, exported = compare(trial, 4)
    assert not [file for file in pinned.iterdir() if file.name == "model.safetensors"]
    assert (exported / "model.safetensors").is_file()
    again = CommittedTrial(tmp_path / "again", path=str(pinned), lora=lora)
    again.commit(4, adapters)
    compare(again, 4)
    base.rename(tmp_path / "moved")
    _, [problem] = read_headers(pinned)
    assert f"belong to the model {base}, which is missing" in problem


def test_transformers_model_is_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    """Covers constants, and the built-in decoder."""
    values = {**BASE, "model_type": "qwen2", "tie_word_embeddings": False}
    made = HFModel(HFConfig.from_hf(values), "lm", source=None, seed=7, dtype=torch.float32)
    with torch.no_grad():
        weights = {name: p.numpy() for name, p in made.named_parameters()}
    trial = CommittedTrial(tmp_path, architecture=values, implementation="hf")
    trial.commit(4, weights)
    pinned, _ = compare(trial, 4)
    loaded = HFModel(HFConfig.from_hf(values), "lm", source=pinned, seed=1, dtype=torch.float32)
    for (name, one), other in zip(loaded.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(one, other), name
    headers, problems = read_headers(pinned)
    assert mismatches(headers, ModelConfig.from_hf(values), "lm") == problems == []


def _config(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


SCALE = 5 / 3
EDGES = ((0, 1, 8, 8, 21), (0, 2, 5, 67))
"""Where rows and columns are cut; one part has no rows."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_merging_parts_equals_merging_the_whole_bit_by_bit(dtype: torch.dtype, rank: int) -> None:
    """Parts have odd rows and columns or one row, for weights as large as their product."""
    generator = torch.Generator().manual_seed(rank)
    rows, columns = (edges[-1] for edges in EDGES)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    b = torch.randn(rows, rank, generator=generator)
    a = torch.randn(rank, columns, generator=generator)
    whole, parts = torch.empty_like(weight), torch.empty_like(weight)
    merge(whole, weight, b, a, SCALE)
    for top, bottom in zip(EDGES[0], EDGES[0][1:], strict=False):
        for left, right in zip(EDGES[1], EDGES[1][1:], strict=False):
            box = slice(top, bottom), slice(left, right)
            merge(parts[box], weight[box], b[box[0]], a[:, box[1]].contiguous(), SCALE, block=1)
    assert torch.equal(parts, whole)
    wide = np.empty((rows, columns), np.float32)
    merge(wide, weight.float().numpy(), b.numpy(), a.numpy(), SCALE)
    assert torch.equal(torch.from_numpy(wide).to(dtype), whole)
    exact = weight.double() + SCALE * (b.double() @ a.double())
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole.double(), exact, rtol=bound, atol=bound / 10)


LORA = Lora(rank=2, targets=("q_proj",))


class Trained:
    def __init__(self, shapes: Any) -> None:
        self._shapes = shapes

    def weights(self) -> list[tuple[str, TensorSpec]]:
        return [(name, TensorSpec(shape, "float32")) for name, shape in self._shapes.items()]

    def read(self, name: str, box: Box) -> Any:
        return np.zeros(box.size, "<f4")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2-tied", "mixtral"])
def test_export_fingerprint_equals_the_sum_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, head: Head
) -> None:
    """The fingerprint covers weights in the type of the ranks. One changed bit changes it."""
    monkeypatch.setattr(model_tensors, "BLOCK", 50)
    config = ModelConfig.from_hf({**BASE, **ODD[family]})
    decoder = build(config, "lm")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_()
    to_hf(decoder, tmp_path)
    trained = trained_shapes(config, head, LORA)
    frozen = {n: p for n, p in decoder.named_parameters() if head == "lm" or n != "lm_head.weight"}
    expected = Fingerprint({n: tuple(p.shape) for n, p in frozen.items()}, torch.device("cpu"))
    for name, parameter in frozen.items():
        values = parameter.detach().to(getattr(torch, dtype))
        for rows in (slice(0, 1), slice(1, None)):  # as two ranks
            part = values[rows]
            start = (rows.start, *(0 for _ in part.shape[1:]))
            if part.numel():
                expected.add(name, Box(start, tuple(part.shape)), part)
    found = MergedCheckpoint(Trained(trained), tmp_path, config, head, LORA)
    found.check_base(str(expected), dtype)
    with torch.no_grad():
        next(iter(frozen.values())).view(-1)[-1] *= -1
    to_hf(decoder, tmp_path)
    other = MergedCheckpoint(Trained(trained), tmp_path, config, head, LORA)
    with pytest.raises(UsageError, match=f"have changed since .* was {expected}"):
        other.check_base(str(expected), dtype)
