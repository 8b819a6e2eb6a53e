from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import WeightVersionError
from slurmrl.tensors.weights.format import BLOCK_BYTES, apply_delta, compress_delta


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
