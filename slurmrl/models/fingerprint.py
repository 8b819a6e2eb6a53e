"""A fingerprint of a model's weights, to which those who hold parts of them add up. Torch-free.

It is the sum over all elements of their bits times an odd random number, modulo 2^64. The number is
a function of the parameter's name and the element's place. So the sum depends neither on the parts
in which weights are added nor on their order, and another element, place or type gives another
sum.
"""

from __future__ import annotations

from collections.abc import Callable

from slurmrl.tensors.layout.box import Box, Index
from slurmrl.tensors.layout.shard import row_major
from slurmrl.tensors.ops.splitmix import Bits, hash64, mix


def summand(
    name: str, shape: Index, box: Box, bits: Bits, count: Callable[[int, int], Bits]
) -> Bits:
    """What a box of a parameter of ``shape`` adds.

    :param bits: flat, the elements of the box as integers of their width.
    :param count: the numbers from one to before another as int64, where ``bits`` are.
    """
    places = count(0, 1)
    for stride, start, size in zip(row_major(shape), box.start, box.size, strict=True):
        places = places[..., None] + count(start, start + size) * stride
    factors = mix(places.reshape(-1) ^ hash64(name)) | 1
    added: Bits = (factors * bits).sum()
    return added


def shown(total: int) -> str:
    """The sum as checkpoints and weight versions name it."""
    return f"{total % 2**64:016x}"
