"""Names of versions, deltas, and the share of an update that survives rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import CorruptFileError, WeightVersionError
from slurmrl.tensors.checkpoint.export import Survival, survival
from slurmrl.tensors.layout import Array
from slurmrl.tensors.weights.format import BLOCK_BYTES, VersionId, apply_delta, compress_delta


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]), st.integers(0, 700))
def test_delta_restores_every_bit(seed: int, item_bytes: int, elements: int) -> None:
    chance = np.random.default_rng(seed)
    old, new = chance.integers(0, 256, (2, elements * item_bytes), np.uint8)
    bits = old.copy()
    apply_delta(compress_delta(new, old, item_bytes), bits, item_bytes)
    assert np.array_equal(bits, new)


@pytest.mark.parametrize("bytes_over", [-2, 0, 2, BLOCK_BYTES])
def test_delta_handles_tensors_of_several_blocks(bytes_over: int) -> None:
    chance = np.random.default_rng(0)
    old = chance.integers(0, 256, 2 * BLOCK_BYTES + bytes_over, np.uint8)
    new = old.copy()
    new[chance.integers(0, old.size, 100)] ^= 3
    stored = compress_delta(new, old, 2)
    assert len(stored) < old.size / 100
    bits = old.copy()
    apply_delta(stored, bits, 2)
    assert np.array_equal(bits, new)


def test_byte_splitting_shrinks_bfloat16_deltas() -> None:
    chance = np.random.default_rng(0)
    old = chance.integers(0, 256, 1 << 20, np.uint8)
    new = old.copy()
    new[::2][chance.random(1 << 19) < 0.05] ^= 1
    assert len(compress_delta(new, old, 2)) < 0.95 * len(compress_delta(new, old, 1))


@pytest.mark.parametrize("size", [98, 102, 0])
def test_delta_of_another_size_is_rejected(size: int) -> None:
    stored = compress_delta(np.ones(100, np.uint8), np.zeros(100, np.uint8), 2)
    with pytest.raises(WeightVersionError, match="than its tensor"):
        apply_delta(stored, np.zeros(size, np.uint8), 2)


def test_invalid_delta_is_rejected() -> None:
    with pytest.raises(WeightVersionError, match="cannot be decompressed"):
        apply_delta(b"what is this?", np.zeros(100, np.uint8), 2)


def test_version_of_a_later_incarnation_is_newer_at_any_step() -> None:
    ids = [VersionId(2, 2), VersionId(10, 1), VersionId(9, 1), VersionId(1, 3)]
    assert [one.name for one in sorted(ids)] == ["9.1", "10.1", "2.2", "1.3"]


def test_version_names_survive_a_round_trip() -> None:
    assert VersionId.parse("12.3") == VersionId(12, 3)
    assert str(VersionId.parse("0.1")) == "0.1"


@pytest.mark.parametrize("name", ["", "1", "1.", "01.1", "1.1.1", "-1.1", "1.1\n", "١.١", "a.b"])
def test_version_names_in_another_form_are_rejected(name: str) -> None:
    with pytest.raises(CorruptFileError, match=r"expected STEP\.INCARNATION"):
        VersionId.parse(name)


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
