"""Recorded sampling masks and experts where ranks share the vocabulary and the sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.engines.microbatch import experts_of
from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import UNKNOWN, Replayed, SparseMLP
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import LENGTHS, Setup, batch, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.one_process import assert_gradients, of_folder, random_model
from tests.distributed.engines.replay_cases import with_experts
from tests.distributed.engines.test_engines_balance import BALANCED
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    EVEN,
    GLM,
    MARGIN,
    MIXTRAL,
    MOE,
    SINKS,
    choosing,
    grid,
    outputs_of,
)
from tests.pool import RankPool

HERE = "tests.distributed.engines.replay_cases:replayed"
RECORDED = "tests.distributed.engines.replay_cases:recorded"
UNSCALED = {**MOE, "norm_topk_prob": False}
LAYOUTS: dict[str, tuple[Placed, dict[str, Any], str]] = {
    "d2 e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), MOE, "selective"),
    "t2 sp p2": (placed(tp=2, sp=True, pp=2), {**MOE, **BALANCED}, "full"),
    "p2 v2": (placed(pp=2, v=2), GLM, "off"),
    "t2 sp e2": (placed(tp=2, sp=True, experts=grid(1, 1, 2, 1)), SINKS, "selective"),
    "c2 e2": (placed(cp=2, experts=grid(1, 1, 2, 1)), UNSCALED, "full"),
    "c3 ring": (placed(cp=3), {**MOE, **BALANCED}, "full"),
    "one": (placed(), UNSCALED, "off"),
    "p2 v2 full": (placed(pp=2, v=2), {**MOE, **BALANCED}, "full"),
    "t2 sp c2": (placed(tp=2, sp=True, cp=2), MOE, "off"),
    "p2 d2 e2": (placed(pp=2, dp=2, experts=grid(2, 1, 2, 1)), MOE, "full"),
    "attn t2 d2 ffn e2 t2": (
        placed(tp=2, sp=True, dp=2, experts=grid(1, 1, 2, 2)), MOE, "selective",
    ),
    "mixtral d2 e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), MIXTRAL, "selective"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("sequence", "sizes"),
    [(False, {"cp": 2, "tp": 2}), (True, {"cp": 2, "tp": 2}), (False, {"cp": 3})],
)
def test_ranks_replay_experts_like_one_process(
    sequence: bool, sizes: dict[str, int], ranks: RankPool, tmp_path: Path
) -> None:
    """Covers layouts in which ranks have parts of sequences."""
    random_model(tmp_path / "model", MOE)
    settings = model(architecture=MOE, max_tokens_per_microbatch=16)
    alone = of_folder(Setup(model=settings, sizes={"dp": 1}), tmp_path / "model")
    (wanted,) = ranks(1, HERE, alone, 3, 4)
    settings = {**settings, "model": {"sequence_parallel": sequence}}
    several = Setup(model=settings, sizes=sizes)
    for found in ranks(several.ranks, HERE, of_folder(several, tmp_path / "model"), 3, 4):
        assert_same(found, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_replays_experts_like_fsdp(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Compares outputs, gradients, statistics and weights of a step with several micro-batches. A
    second model without recorded experts uses its router as before.
    """
    megatron_as_fsdp(*LAYOUTS[name], ranks, tmp_path)


def megatron_as_fsdp(
    where: Placed,
    architecture: dict[str, Any],
    recompute: str,
    ranks: RankPool,
    folder: Path,
    **more: bool,
) -> None:
    """Compare megatron with fsdp; ``more`` are further settings of megatron's model."""
    decoder = random_model(folder / "model", architecture)
    blocks, experts = len(decoder._sparse_blocks), 4
    assert free_margin(decoder.double(), blocks, experts) > MARGIN
    alone = of_folder(Setup(model=model(), sizes={"dp": 1}), folder / "model")
    settings = model(architecture=None, gradient_checkpointing=recompute, **BUDGET, **more)
    several = Case(where, settings, source=folder / "model")
    saved = [folder / "alone", folder / "several"]
    for each in saved:
        each.mkdir()
    (wanted,) = ranks(1, RECORDED, alone, blocks, experts, saved[0])
    found = ranks(len(where.ranks), RECORDED, several, blocks, experts, saved[1])
    away = (wanted.outputs["logp"] - wanted.without["logp"]).abs()
    assert away.mean() > 0.05, "the record is that of the routers"
    for part in found:
        for kind in ("outputs", "without", "reference"):
            for output, values in getattr(wanted, kind).items():
                own = torch.cat([values.split(LENGTHS)[item] for item in part.items])
                assert (getattr(part, kind)[output] - own).abs().max() < 1e-5, (kind, output)
        for stat in ("loss", "grad_norm"):
            assert part.stats[stat] == pytest.approx(wanted.stats[stat], rel=1e-5)
    fsdp, megatron = (RoleCheckpoint(each, "actor") for each in saved)
    constants = decoder.constants()
    names = [name for name, _ in fsdp.weights() if name not in constants]
    gradients = {name: of_step(fsdp, f"exp_avg/{name}") for name in names}
    assert_gradients(saved[1], gradients, 4e-6, constants)
    for name in names:
        assert (of_step(megatron, name) - of_step(fsdp, name)).abs().max() < 1e-5, name


def test_megatron_router_chooses_experts_for_incomplete_records(ranks: RankPool) -> None:
    """Two of three experts are chosen in each of two blocks. A damaged record must not lower this
    number.
    """
    rows = [[[0, 2], [2, 1]], [[UNKNOWN, UNKNOWN], [1, 0]], [[1, 1], [UNKNOWN, 2]]]
    (found,) = ranks(1, "tests.distributed.engines.replay_cases:marked", rows, 3)
    free = [1, 1, 1]
    assert found == [[1, 1, 0, 1, 0, 1, 1], [1, *free, 1, 1, 0], [1, *free, *free]]


def of_step(checkpoint: RoleCheckpoint, name: str) -> Tensor:
    return torch.from_numpy(checkpoint.read(name))


def free_margin(decoder: Decoder, blocks: int, experts: int) -> float:
    """Return the smallest router margin of tokens without a record. Rounding must not change their
    experts.
    """
    sample, found = with_experts(batch(), blocks, experts), []

    def note(block: SparseMLP, _: Any, logits: Tensor) -> None:
        ranked = choosing(block, logits[free[:, block.number]]).sort(-1, descending=True).values
        found.extend((ranked[:, block.per_token - 1] - ranked[:, block.per_token]).tolist())

    hooks = [
        block.gate.register_forward_hook(lambda _, *args, block=block: note(block, *args))
        for block in decoder._sparse_blocks
    ]
    for item in (sample.take([index]) for index in range(sample.bs)):
        recorded = experts_of(item, decoder.config)
        assert recorded is not None
        free = (recorded == UNKNOWN).all(-1)
        with torch.no_grad(), decoder.routed(Replayed(recorded)):
            outputs_of(decoder, item)
    for hook in hooks:
        hook.remove()
    assert len(found) > len(LENGTHS)
    return float(min(found))


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_ranks_replay_sampling_masks_like_one_process(
    engine: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Compares outputs, and the loss and gradients of a step with several micro-batches."""
    random_model(tmp_path / "model", EVEN)
    settings = model(architecture=EVEN, max_tokens_per_microbatch=16)
    alone = of_folder(Setup(model=settings, sizes={"dp": 1}), tmp_path / "model")
    (wanted,) = ranks(1, HERE, alone)
    if engine == "megatron":
        settings = {**settings, "model": {"make_vocab_size_divisible_by": 1}}
    several = Setup(engine=engine, model=settings, sizes={"cp": 2, "tp": 2})
    for found in ranks(4, HERE, of_folder(several, tmp_path / "model")):
        assert_same(found, wanted)


def assert_same(found: Any, wanted: Any) -> None:
    """The outputs, and the statistics of a step."""
    (outputs, stats), (wanted_outputs, wanted_stats) = found, wanted
    for name, values in wanted_outputs.items():
        assert (outputs[name] - values).abs().max() < 2e-5, name
    for name in ("loss", "grad_norm"):
        assert stats[name] == pytest.approx(wanted_stats[name], rel=1e-5)
