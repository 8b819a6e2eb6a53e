"""A copy for a checkpoint does not change while training continues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.engines.cases import Setup, batch, denominator, loss, make, model
from tests.pool import RankPool

FOLDERS = ("before", "copied", "again", "after")


def saved_around_training(setup: Setup, folder: Path) -> list[str]:
    """Return checksums of this rank's arrays: saved before more training, in two copies that are
    written after it, and saved after it.
    """
    engine = make(setup)
    sample = batch().take(setup.split[engine.context.dp_rank])
    engine.train_batch(sample, loss, denominator(sample))
    before = engine.save(folder / "before")
    copy = engine.snapshot()
    assert copy is not None
    for _ in range(2):
        torch.rand(3)
        engine.train_batch(sample, loss, denominator(sample))
    copied = copy.write(folder / "copied")
    again = engine.snapshot()
    assert again is not None
    after = engine.save(folder / "after")
    return [files[0].checksum for files in (before, copied, again.write(folder / "again"), after)]


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        ("fsdp", "float32"),
        pytest.param("megatron", "float32", marks=pytest.mark.long),
        pytest.param("megatron", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_snapshot_is_unchanged_while_training_continues(
    ranks: RankPool, tmp_path: Path, engine: str, dtype: str
) -> None:
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    settings = model(optimizer={"betas": (0.9, 0.95)}, dtype=dtype)
    setup = Setup(engine=engine, model=settings, split=[[0, 1, 2], [3, 4]])
    here = f"{__name__}:saved_around_training"
    for before, copied, again, after in ranks(2, here, setup, tmp_path):
        assert copied == before
        assert again == after
        assert after != before
