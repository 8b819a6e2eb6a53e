"""Counter-based random bits: chains of SplitMix64's finalizer (Steele, Lea and Flood 2014).

Each random number is a pure function of its key. The number does not depend on the other numbers of
a batch, their order, or the device. Torch-free.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from slurmrl.tensors.layout import Array

if TYPE_CHECKING:
    from torch import Tensor

Bits = TypeVar("Bits", Array, "Tensor")
"""Array or tensor of int64. (A scalar is not allowed, because NumPy warns if a scalar wraps.)"""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def start(*numbers: int) -> int:
    """Return a state (a signed 64-bit integer) from a sequence of integers."""
    state = 0
    for number in numbers:
        state = _mix_int(state ^ (number & _MASK))
    return _signed(state)


def mix(x: Bits) -> Bits:
    """Return 64 random bits for each number. Multiplication wraps around."""
    x = x + _signed(_GOLDEN)
    x = (x ^ shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ shift(x, 27)) * _signed(_MIX_2)
    return x ^ shift(x, 31)


def shift(x: Bits, bits: int) -> Bits:
    """Return the logical right shift; the operator of int64 shifts arithmetically."""
    shifted: Bits = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def hash64(text: str) -> int:
    """Return a stable hash of a string, as a signed 64-bit integer."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _mix_int(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Return the signed integer with the 64 bits of x."""
    return x - 2**64 if x >= 2**63 else x
