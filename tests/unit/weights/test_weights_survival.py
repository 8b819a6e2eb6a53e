"""The share of an update that survives rounding."""

from __future__ import annotations

import numpy as np
import pytest

from slurmrl.tensors.checkpoint.export import Survival, survival
from slurmrl.tensors.layout import Array


def start() -> Array:
    """Return weights that bfloat16 represents exactly."""
    bits = np.random.default_rng(1).normal(0, 0.05, (64, 512)).astype("<f4").view("<u4")
    return (bits & 0xFFFF0000).view("<f4")


@pytest.mark.parametrize(
    ("update", "dtype", "low", "high"),
    [
        (1e-6, "bfloat16", 0.0, 0.02),
        (1e-6, "float16", 0.0, 0.2),
        (1e-6, "float32", 0.999, 1.0),
        (1e-2, "bfloat16", 0.99, 1.0),
    ],
)
def test_kept_update_share_follows_update_size_and_dtype(
    update: float, dtype: str, low: float, high: float
) -> None:
    weights = start()
    signs = np.random.default_rng(2).choice([-1, 1], weights.shape).astype("<f4")
    share = survival(weights, weights + signs * np.float32(update), dtype).share
    assert share is not None
    assert low <= share <= high


def test_kept_update_share_ignores_unrelated_rounding() -> None:
    """The rounding of float32 weights does not count as a loss of the update."""
    weights = np.random.default_rng(3).normal(0, 0.05, 2**20).astype("<f4")
    share = survival(weights, weights + np.float32(1e-5), "bfloat16").share
    assert share is not None
    assert share > 0.9


def test_kept_update_share_is_unknown_without_an_update() -> None:
    assert survival(start(), start(), "bfloat16").share is None


def test_survival_share_adds_up_over_parts() -> None:
    weights = start()
    trained = weights * np.float32(1.001)
    whole = survival(weights, trained, "bfloat16")
    parts = [survival(weights[n::2], trained[n::2], "bfloat16") for n in range(2)]
    assert sum(parts, Survival()).share == pytest.approx(whole.share)
