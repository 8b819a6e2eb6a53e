"""Losses and gradients equal TRL's, or differ as documented in docs/migrating/trl.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.pool import RankPool
from tests.support.decoder_folders import from_hf
from tests.trl.cases import CASES, Case
from tests.trl.conftest import Reference
from tests.trl.runs import total_loss, train

BOUND = 1e-5
SPLIT = {"sft": [[0, 2, 3, 4, 5, 6], [1]], "kto": [[1, 2, 4], [0, 3]]}
"""Items of each rank: uneven on purpose."""
UNEVEN = [[0, 2, 3], [1]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_trl(case: Case, reference: Reference, tmp_path: Path) -> None:
    """Both train one step on the same weights and batch: TRL's trainer in one batch with float64
    weights, and slurmrl in micro-batches in float32.
    """
    stats = train(reference.folder, case, tmp_path / "saved")
    check(case, reference, total_loss(stats), tmp_path / "saved")


@pytest.mark.parametrize(
    "name",
    ["sft", "kto", "grpo-sequences", "grpo-dapo", "grpo-std-of-batch", "grpo-truncated"],
)
def test_loss_and_gradients_on_two_ranks_equal_trl(
    name: str, reference: Reference, ranks: RankPool, tmp_path: Path
) -> None:
    """Denominators and statistics cover the batch of all ranks."""
    case = next(case for case in CASES if case.name == name)
    function, parts = "tests.trl.runs:train", SPLIT.get(name, UNEVEN)
    results = ranks(2, function, reference.folder, case, tmp_path / "saved", parts)
    for stats in results:
        check(case, reference, total_loss(stats), tmp_path / "saved")


def check(case: Case, reference: Reference, loss: float, saved: Path) -> None:
    theirs = reference.losses[case.name]
    same_loss = loss == pytest.approx(theirs, rel=BOUND, abs=BOUND)
    assert same_loss == (case.differs not in ("loss", "both")), (loss, theirs)
    error = gradient_error(case, reference, saved)
    assert (error < BOUND) == (case.differs not in ("gradients", "both")), error


def gradient_error(case: Case, reference: Reference, saved: Path) -> float:
    """Return the largest difference of gradient entries, divided by the largest entry."""
    head = "value" if case.trainer == "Reward" else "lm"
    folder = reference.folder / "gradients" / case.name
    expected = dict(from_hf(folder, head, dtype=torch.float64).named_parameters())
    checkpoint = RoleCheckpoint(saved, "actor")
    assert {name for name, _ in checkpoint.weights()} == set(expected)
    unit = max(float(p.detach().abs().max()) for p in expected.values())
    assert unit > 1e-3, "no gradient to compare"
    differences = {
        name: torch.from_numpy(checkpoint.read(f"exp_avg/{name}")).double() - p.detach()
        for name, p in expected.items()
    }
    return max(float(x.abs().max()) for x in differences.values()) / unit
