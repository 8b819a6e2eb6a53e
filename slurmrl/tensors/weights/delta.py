"""The difference of two versions of a tensor: XOR of the bits, split into planes, compressed.

The tensor is treated in blocks of `BLOCK_BYTES`, which stay in a core's cache. In each block the
first bytes of all elements come first, then the second ones, and so on: a small step of the
optimizer changes the low bytes of few elements, and their high bytes almost never. The blocks of a
tensor make one zstd frame. Bits are flat arrays of uint8.
"""

from __future__ import annotations

import numpy as np
import zstandard

from slurmrl.errors import WeightVersionError
from slurmrl.tensors.layout.copy import Array

BLOCK_BYTES = 1 << 20
"""Part of the format; a multiple of every item size."""
LEVEL = 1
"""Of zstd. Higher levels save nothing on these bits (docs/benchmarks.md)."""


def compressed(bits: Array, base: Array, item_bytes: int) -> bytes:
    """The compressed difference of two arrays of equal size."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=bits.size)
    pieces = []
    for begin in range(0, bits.size, BLOCK_BYTES):
        block = bits[begin : begin + BLOCK_BYTES] ^ base[begin : begin + BLOCK_BYTES]
        pieces.append(compressor.compress(_split(block, item_bytes).data))
    pieces.append(compressor.flush())
    return b"".join(pieces)


def apply(stored: bytes | memoryview, bits: Array, item_bytes: int) -> None:
    """Change ``bits`` in place by a difference that `compressed` made. Raises WeightVersionError if
    it is not of an array of this size; the bits are then unusable."""
    buffer = np.empty(min(BLOCK_BYTES, bits.size), np.uint8)
    try:
        with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
            for begin in range(0, bits.size, BLOCK_BYTES):
                block = bits[begin : begin + BLOCK_BYTES]
                planes = buffer[: block.size]
                _fill(reader, planes)
                block.view(_word(item_bytes))[...] ^= _joined(planes, item_bytes)
            if reader.read(1):
                raise WeightVersionError("a difference is longer than its tensor")
    except zstandard.ZstdError as error:
        raise WeightVersionError(f"a difference cannot be decompressed: {error}") from error


def _split(block: Array, item_bytes: int) -> Array:
    """The planes of a block, one after the other."""
    words = block.view(_word(item_bytes))
    planes = np.empty((item_bytes, words.size), np.uint8)
    for place, plane in enumerate(planes):
        np.right_shift(words, 8 * place, out=plane, casting="unsafe")
    return planes.reshape(-1)


def _joined(planes: Array, item_bytes: int) -> Array:
    """The elements whose planes these are, as unsigned integers."""
    *low, highest = planes.reshape(item_bytes, -1)
    words = highest.astype(_word(item_bytes))
    for plane in reversed(low):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
    return words


def _word(item_bytes: int) -> str:
    """The numpy type of elements as unsigned integers. Shifts of these are several times as fast as
    a transposition of bytes."""
    return f"<u{item_bytes}"


def _fill(reader: zstandard.ZstdDecompressionReader, target: Array) -> None:
    view = target.data
    while view:
        count = reader.readinto(view)
        if not count:
            raise WeightVersionError("a difference is shorter than its tensor")
        view = view[count:]
