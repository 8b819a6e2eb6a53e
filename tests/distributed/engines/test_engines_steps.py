"""Optimizer steps with clipping, decay and moments against torch's optimizer in one process, and
skipped steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.engines.base import TrainEngine
from slurmrl.models.decoder import Decoder
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch, denominator, model
from tests.distributed.engines.megatron_cases import Case, placed, share, step
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    EVEN,
    MARGIN,
    MOE,
    grid,
    margins,
    outputs_of,
    start,
)
from tests.distributed.engines.test_engines_offload import made
from tests.pool import RankPool

STEPS = 3
CLIP = 0.02
"""Below the norm of every step."""
OPTIONS = {
    "lr": 1e-2,
    "betas": (0.9, 0.95),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "gradient_clip": CLIP,
}
SHARE = 1e-5
"""Of a tensor's whole change, or of its largest moment, that rounding may make."""
HALF = torch.finfo(torch.float32).eps / 2
"""What rounding a weight may change in a step."""
FSDP = {"t2": {"tp": 2}, "d2": {"dp": 2}, "c2": {"cp": 2}}
SPARSE = {**MOE, "initializer_range": 0.17}
"""With a margin at the weights after each of these steps."""
MEGATRON = {
    "t2 sp": (placed(tp=2, sp=True), EVEN),
    "p2": (placed(pp=2), EVEN),
    "d2": (placed(dp=2), EVEN),
    "d2 e2": (placed(dp=2, experts=grid(1, 1, 2, 1)), SPARSE),
}
SETTINGS = model(architecture=None, optimizer=OPTIONS, **BUDGET)
LAYOUTS = [
    *(
        pytest.param(Setup(model=SETTINGS, sizes=sizes), EVEN, id=f"fsdp {name}")
        for name, sizes in FSDP.items()
    ),
    *(
        pytest.param(
            Case(where, SETTINGS), architecture, id=f"megatron {name}", marks=pytest.mark.long
        )
        for name, (where, architecture) in MEGATRON.items()
    ),
]


def steps(case: Setup | Case, folder: Path) -> list[dict[str, float]]:
    """Train several steps, and save the last state. Return the statistics of each step."""
    engine = made(case)
    stats = [step(engine, number) for number in range(STEPS)]
    engine.save(folder)
    return stats


def left_out(case: Setup | Case, folders: tuple[Path, Path], why: str) -> tuple[Any, ...]:
    """Return the statistics of a skipped step, the number of completed steps, and the statistics of
    the next step by this engine and by a new one. Both states are saved.
    """
    engine, fresh = made(case), made(case)
    sample = batch().take(share(engine))
    if why == "skipped":  # the gradient is infinite on one data-parallel rank
        factor = float("inf") if engine.context.dp_rank == 0 else 1.0
        lost = engine.train_batch(
            sample, lambda out, _: (out["logp"].sum() * factor, {}), denominator(sample)
        )
    else:
        lost = engine.train_batch(
            sample, cases.loss, denominator(sample), veto=lambda stats: one_objects(engine, stats)
        )
    made_steps = engine.steps
    found = [step(one, 0) for one in (engine, fresh)]
    for one, folder in zip((engine, fresh), folders, strict=True):
        one.save(folder)
    return lost, made_steps, *found


def one_objects(engine: TrainEngine, stats: Mapping[str, float]) -> bool:
    """Return one object per rank to sum.

    Of ranks with the same samples, only the last one counts.
    """
    whole = sum(cases.LENGTHS)
    others = engine.context.size // engine.context.dp_size - 1
    place = engine.context.rank % (others + 1) if others else 0
    return stats["tokens"] == stats["denominator"] == whole and place == others


def one_process(decoder: Decoder) -> tuple[list[float], dict[str, Tensor]]:
    """Return the gradient norm of each step, and the content of a checkpoint after the
    last step.
    """
    groups = [
        {"params": [p], "weight_decay": OPTIONS["weight_decay"] if p.dim() > 1 else 0.0}
        for p in decoder.parameters()
    ]
    kept = {name: OPTIONS[name] for name in ("lr", "betas", "eps")}
    optimizer = torch.optim.AdamW(groups, **kept)  # type: ignore[arg-type]
    norms = []
    for number in range(STEPS):
        sample = batch(number)
        optimizer.zero_grad()
        with margins(decoder) as routed:
            total, _ = cases.loss(outputs_of(decoder, sample), sample)
        assert min(routed, default=1.0) > MARGIN
        (total / denominator(sample)).backward()  # type: ignore[no-untyped-call]
        norms.append(torch.nn.utils.clip_grad_norm_(decoder.parameters(), CLIP).item())
        optimizer.step()
    found = {name: p.detach() for name, p in decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment}/{name}"] = optimizer.state[parameter][moment]
    return norms, found


@pytest.mark.parametrize(("case", "architecture"), LAYOUTS)
def test_optimizer_steps_match_one_process(
    ranks: RankPool, tmp_path: Path, case: Setup | Case, architecture: dict[str, Any]
) -> None:
    decoder = start(tmp_path, architecture, "lm")
    first = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    (tmp_path / "saved").mkdir()
    placed = replace(case, source=tmp_path)
    results = ranks(2, f"{__name__}:steps", placed, tmp_path / "saved", deadline_s=300.0)
    norms, expected = one_process(decoder)
    assert min(norms) > CLIP
    for stats in results:
        assert [one["grad_norm"] for one in stats] == pytest.approx(norms, rel=1e-5)
    checkpoint = RoleCheckpoint(tmp_path / "saved", "actor")
    assert set(checkpoint.layout.tensors) == set(expected)
    for name, wanted in expected.items():
        found = torch.from_numpy(checkpoint.read(name))
        change = (wanted - first[name] if name in first else wanted).abs().max().item()
        rounded = STEPS * HALF * wanted.abs().max().item() if name in first else 0.0
        difference = (found - wanted).abs().max().item()
        assert difference <= SHARE * change + rounded, (name, difference, change)


@pytest.mark.parametrize("why", ["skipped", "vetoed"])
@pytest.mark.parametrize(("case", "architecture"), LAYOUTS)
def test_skipped_step_changes_no_weights(
    ranks: RankPool, tmp_path: Path, case: Setup | Case, architecture: dict[str, Any], why: str
) -> None:
    """The step is skipped because its gradient is not finite, or because of its statistics."""
    folders = tmp_path / "after", tmp_path / "fresh"
    for folder in folders:
        folder.mkdir()
    start(tmp_path, architecture, "lm")
    placed = replace(case, source=tmp_path)
    results = ranks(2, f"{__name__}:left_out", placed, folders, why, deadline_s=300.0)
    for lost, made_steps, found, fresh in results:
        assert {name for name in ("skipped", "vetoed") if lost[name]} == {why}
        assert made_steps == 0
        assert found == fresh
    for rank in range(2):
        one, other = (folder / f"actor.{rank}.safetensors" for folder in folders)
        assert one.read_bytes() == other.read_bytes()
