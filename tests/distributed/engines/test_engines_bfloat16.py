"""In bfloat16, sums over tokens, micro-batches and ranks are computed in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs
from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import ARCHITECTURE, LENGTHS, Setup, batch, make, model
from tests.pool import RankPool

HERE = "tests.distributed.engines.test_engines_bfloat16"
CASES = "tests.distributed.engines.cases"
LARGE, ITEMS = 512.0, 8
KINDS = [
    pytest.param("fsdp", {}, id="fsdp-root"),
    pytest.param("fsdp", {"small_bytes": 0}, id="fsdp-layers"),
    pytest.param("megatron", {}, id="megatron", marks=pytest.mark.long),
]


def sum_of_unequal_parts(setup: Setup, folder: Path) -> None:
    """Train one step on equal items, each in its own micro-batch. The loss of the first item has
    the weight ``LARGE``. Powers of two scale gradients exactly in any dtype.
    """
    engine = make(setup)
    tokens = torch.randint(33, (12,), generator=torch.Generator().manual_seed(3))
    sample = SequenceSample.from_default(
        [len(tokens)] * ITEMS,
        [str(index) for index in range(ITEMS)],
        {"input_ids": tokens.repeat(ITEMS)},
    ).take(setup.split[engine.context.dp_rank])

    def loss(outputs: Outputs, part: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
        return -outputs["logp"].sum() * (LARGE if part.ids == ("0",) else 1.0), {}

    engine.train_batch(sample, loss, 1.0 / len(setup.split))
    engine.save(folder)


def first_moments(folder: Path) -> dict[str, Tensor]:
    """The gradients of the last step."""
    saved = RoleCheckpoint(folder, "actor")
    return {name: torch.from_numpy(saved.read(f"exp_avg/{name}")) for name, _ in saved.weights()}


def values_after_a_step(setup: Setup) -> Tensor:
    """The values of a critic, whose head starts at zero."""
    engine = make(setup)
    engine.train_batch(batch(), lambda outputs, _: (-outputs["values"].sum(), {}), 1.0)
    return engine.forward(batch())["values"]


@pytest.mark.parametrize(("engine", "options"), KINDS)
def test_values_are_summed_in_float32(
    ranks: RankPool, engine: str, options: dict[str, Any]
) -> None:
    """The sums are more precise than bfloat16, the type of the features and of the head's
    weight.
    """
    setup = Setup(model=model(dtype="bfloat16"), engine=engine, head="value", options=options)
    (values,) = ranks(1, f"{HERE}:values_after_a_step", setup)
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).float().mean() > 0.5


@pytest.mark.parametrize(("engine", "options"), KINDS)
def test_small_gradients_next_to_a_large_one_are_kept(
    ranks: RankPool, tmp_path: Path, engine: str, options: dict[str, Any]
) -> None:
    """The gradients come from other micro-batches and other ranks. In bfloat16, 512 + 1 is 512."""
    settings = model(dtype="bfloat16", max_tokens_per_microbatch=12)
    split = [[0, 1], [2, 3, 4], [5], [6, 7]]
    setup = Setup(engine=engine, model=settings, options=options, split=split)
    for name, one in (("all", setup), ("one", replace(setup, split=[[1]]))):
        (tmp_path / name).mkdir()
        ranks(len(one.split), f"{HERE}:sum_of_unequal_parts", one, tmp_path / name)
    whole, part = first_moments(tmp_path / "all"), first_moments(tmp_path / "one")
    for name, gradient in part.items():
        assert gradient.any(), name
        expected = gradient * (LARGE + ITEMS - 1)
        assert (whole[name] - expected).abs().max() <= 1e-6 * expected.abs().max(), name


@pytest.mark.parametrize(("engine", "options"), KINDS)
def test_steps_below_the_resolution_of_bfloat16_add_up(
    ranks: RankPool, tmp_path: Path, engine: str, options: dict[str, Any]
) -> None:
    """Weights move as with float32 where each step is less than the distance between neighbors."""
    optimizer = {"name": "sgd", "lr": 1e-5}
    shares = [list(range(start, len(LENGTHS), 2)) for start in range(2)]
    config = ModelConfig.from_hf(ARCHITECTURE)
    moved: list[dict[str, Tensor]] = []
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        folder.mkdir()
        settings = model(dtype=dtype, optimizer=optimizer)
        setup = Setup(engine=engine, model=settings, options=options, split=shares)
        ranks(2, f"{CASES}:train", setup, range(3), save=folder)
        saved = RoleCheckpoint(folder, "actor")
        moved.append({})
        for name, tensor in saved.weights():
            first = init_tensor(name, tuple(tensor.shape), config, seed=7)
            now = torch.from_numpy(saved.read(name))
            moved[-1][name] = now - first
            assert (now.bfloat16() == first.bfloat16()).float().mean() > 0.9, name
    for name, exact in moved[0].items():
        assert (moved[1][name] - exact).norm() < 0.2 * exact.norm(), name
