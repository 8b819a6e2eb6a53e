"""A batch without its tensors: ids, lengths, metadata, and the names of recorded keys. Torch-free.

The sampling mask of a token lists the token ids that top-k and top-p kept, ascending. An empty mask
stands for the whole vocabulary. Tokens that were not sampled have empty masks, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

Lengths = dict[str, list[list[int]]]

SIZES = "support_sizes"
"""Key of a batch: the number of token ids in each token's sampling mask."""
IDS = "support_ids"
"""Key of a batch: the concatenated token ids of a sequence's sampling masks."""
EXPERTS = "experts"
"""Key of a batch: the experts that each block used for each token of a sequence, concatenated. -1
stands for the router's choice. A sequence without a record has no experts."""


@dataclass
class SampleMeta:
    """Ids, per-key lengths and metadata of a batch of items.

    An item has one or more sequences per key: ``lengths[key][item]`` lists their lengths.
    ``metadata[key][item]`` is any JSON value.
    """

    ids: tuple[str, ...]
    lengths: Lengths
    metadata: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = tuple(self.ids)
        if len(set(self.ids)) != len(self.ids):
            twice = sorted({name for name in self.ids if self.ids.count(name) > 1}, key=str)
            raise ValueError(f"duplicate sample ids: {twice[:5]}")
        for table in (self.lengths, self.metadata):
            for key, rows in table.items():
                if len(rows) != self.bs:
                    raise ValueError(f"key '{key}' has {len(rows)} items, not {self.bs}")

    @property
    def bs(self) -> int:
        """Number of items."""
        return len(self.ids)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.lengths)

    def item_lengths(self, key: str | None = None) -> list[int]:
        """Return the number of tokens of each item under ``key`` (default: the main key)."""
        return [sum(inner) for inner in self.lengths[key or self.main_key()]]

    def sequence_counts(self, key: str) -> list[int]:
        """Return the number of sequences of each item under ``key``."""
        return [len(row) for row in self.lengths[key]]

    def main_key(self) -> str:
        """Return the key with the largest total length; the first of several such keys."""
        if not self.lengths:
            raise ValueError("a sample without keys has no main key")
        return max(self.lengths, key=lambda key: sum(map(sum, self.lengths[key])))


def one_each(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the lengths of a key with one value for each sequence.

    ``rows`` are the lengths of a key with one value for each token.
    """
    return [[1] * len(row) for row in rows]


def repeated(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    """Return the value of each item, once for each of its sequences."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


@dataclass
class SampledMasks:
    """The sampling masks of the tokens of a sequence, in their order."""

    sizes: array[int] = field(default_factory=lambda: array("i"))
    """Number of token ids of each mask."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The token ids of all masks."""

    def add(self, ids: Sequence[int]) -> None:
        """Add the mask of the next token."""
        self.sizes.append(len(ids))
        self.ids.extend(ids)

    def skip(self, tokens: int) -> None:
        """Add tokens without a mask."""
        self.sizes.extend([0] * tokens)

    def extend(self, other: SampledMasks) -> None:
        self.sizes += other.sizes
        self.ids += other.ids

    def cut(self, lengths: Iterable[int]) -> list[SampledMasks]:
        """Split the masks into consecutive parts with these numbers of tokens."""
        parts, token, number = [], 0, 0
        for length in lengths:
            sizes = self.sizes[token : token + length]
            count = sum(sizes)
            parts.append(SampledMasks(sizes, self.ids[number : number + count]))
            token, number = token + length, number + count
        return parts
