"""Disturbed trials with rollout tasks complete by themselves and train each item once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import private_bed
from tests.support.rollout_storm import weather

SEEDS = 30
LONG = (7,)
"""Seeds that stand for the others: this one damages a weight version that tasks need."""


@pytest.fixture
def bed() -> Iterator[Path]:
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root may mount a small disk")
    with private_bed() as directory:
        yield directory


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.long if seed in LONG else pytest.mark.soak)
        for seed in range(1, SEEDS + 1)
    ],
)
def test_each_item_is_trained_once_despite_disturbances(
    tmp_path: Path, bed: Path, seed: int
) -> None:
    met, problems = weather(tmp_path, bed, seed)
    assert problems == [], f"after {', '.join(met)}"
