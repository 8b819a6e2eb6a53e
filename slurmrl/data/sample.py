"""``SequenceSample``: a batch of items whose sequences are packed, key by key, into 1-D tensors.

Per-token keys are aligned with the tokens: entry t belongs to token t of its sequence. So
``logprobs[t]`` is log p(x_t | x_<t), and 0 at the first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from slurmrl.data.meta import SampleMeta, one_each, repeated
from slurmrl.tensors.pictures import METADATA, NONE


@dataclass
class SequenceSample(SampleMeta):
    """Meta plus data: ``data[key]`` has shape [sum of lengths[key], ...], or is None."""

    data: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.data) != set(self.lengths):
            raise KeyError(f"data has keys {sorted(self.data)}, lengths has {sorted(self.lengths)}")
        for key, tensor in self.data.items():
            total = sum(map(sum, self.lengths[key]))
            if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != total):
                shape = tuple(tensor.shape)
                raise ValueError(f"key '{key}' has shape {shape}, its lengths add up to {total}")

    @staticmethod
    def from_default(
        lengths: Sequence[int],
        ids: Sequence[str],
        data: Mapping[str, Tensor | None],
        metadata: Mapping[str, list[Any]] | None = None,
        *,
        per_sequence: Mapping[str, Tensor | None] | None = None,
    ) -> SequenceSample:
        """Make a sample of items with one sequence each; ``lengths`` are the numbers of tokens.

        ``data`` has an entry for each token, ``per_sequence`` one for each sequence.
        """
        rows = [[length] for length in lengths]
        return SequenceSample.grouped(rows, ids, data, metadata, per_sequence=per_sequence)

    @staticmethod
    def grouped(
        rows: Sequence[Sequence[int]],
        ids: Sequence[str],
        data: Mapping[str, Tensor | None],
        metadata: Mapping[str, list[Any]] | None = None,
        *,
        per_sequence: Mapping[str, Tensor | None] | None = None,
    ) -> SequenceSample:
        """Make a sample like `from_default`, of items with several sequences.

        ``rows[item]`` lists the lengths of the item's sequences.
        """
        tokens = [list(row) for row in rows]
        single = per_sequence or {}
        lengths = dict.fromkeys(data, tokens) | {key: one_each(tokens) for key in single}
        return SequenceSample(tuple(ids), lengths, dict(metadata or {}), {**data, **single})

    @staticmethod
    def gather(
        samples: Sequence[SequenceSample], keys: Iterable[str] | None = None
    ) -> SequenceSample:
        """Return the items of all samples in order.

        The first sample determines the keys, the keys without data, and the metadata.
        """
        if not samples:
            raise ValueError("there are no samples to gather")
        first = samples[0]
        wanted = first.keys if keys is None else tuple(keys)
        return SequenceSample(
            ids=tuple(chain.from_iterable(sample.ids for sample in samples)),
            lengths={key: _join(sample.lengths[key] for sample in samples) for key in wanted},
            metadata={
                key: _join(sample.metadata[key] for sample in samples) for key in first.metadata
            },
            data={
                key: None
                if first.data[key] is None
                else torch.cat([sample.tensor(key) for sample in samples])
                for key in wanted
            },
        )

    def tensor(self, key: str) -> Tensor:
        """Return the data of a key, which must not be None."""
        value = self.data[key]
        if value is None:
            raise ValueError(f"key '{key}' holds no data")
        return value

    def cu_seqlens(self, key: str) -> Tensor:
        """Return cumulative lengths of the sequences under ``key``: int32 [S+1], in host memory."""
        cuts = [0, *accumulate(chain.from_iterable(self.lengths[key]))]
        return torch.tensor(cuts, dtype=torch.int32)

    def slice(self, start: int, stop: int) -> SequenceSample:
        """Return items start..stop-1; the tensors are views."""
        data: dict[str, Tensor | None] = {}
        for key, tensor in self.data.items():
            totals = self.item_lengths(key)
            begin = sum(totals[:start])
            size = sum(totals[start:stop])
            data[key] = None if tensor is None else tensor.narrow(0, begin, size)
        return self._with_items(range(start, stop), data)

    def take(self, indices: Sequence[int]) -> SequenceSample:
        """Return the items at ``indices``, in this order; ``indices`` may be empty."""
        data: dict[str, Tensor | None] = {}
        for key, tensor in self.data.items():
            cuts = [0, *accumulate(self.item_lengths(key))]
            data[key] = None if tensor is None else _pick(tensor, cuts, indices)
        return self._with_items(indices, data)

    def only(self, keys: Iterable[str]) -> SequenceSample:
        """Return the same items with only some of the keys; tensors are shared."""
        wanted = tuple(keys)
        return SequenceSample(
            self.ids,
            {key: self.lengths[key] for key in wanted},
            self.metadata,
            {key: self.data[key] for key in wanted},
        )

    def sequences(self) -> SequenceSample:
        """Return each sequence as a separate item, named ``<id>#<place in the item>``.

        The tensors are shared. Use the result for calculations that do not need the sequences of an
        item together.

        Raises ValueError if an item has more sequences under one key than under another.
        """
        counts = self.sequence_counts(self.main_key()) if self.keys else []
        for key in self.keys:
            if self.sequence_counts(key) != counts:
                raise ValueError(f"key '{key}' does not have the same sequences as the other keys")
        if all(count == 1 for count in counts):
            return self
        names = zip(self.ids, counts, strict=True)
        return SequenceSample(
            ids=tuple(f"{name}#{place}" for name, count in names for place in range(count)),
            lengths={
                key: [[length] for row in rows for length in row]
                for key, rows in self.lengths.items()
            },
            metadata={key: repeated(values, counts) for key, values in self.metadata.items()},
            data=self.data,
        )

    def update_(self, other: SequenceSample) -> None:
        """Add the keys and metadata of ``other``, which has the same ids; tensors are shared."""
        if other.ids != self.ids:
            raise ValueError(f"update needs the same ids in the same order: {self._differs(other)}")
        self.lengths.update(other.lengths)
        self.metadata.update(other.metadata)
        self.data.update(other.data)

    def to(self, device: torch.device | str) -> SequenceSample:
        data = {key: None if t is None else t.to(device) for key, t in self.data.items()}
        return SequenceSample(self.ids, self.lengths, self.metadata, data)

    def _with_items(self, indices: Sequence[int], data: dict[str, Tensor | None]) -> SequenceSample:
        return SequenceSample(
            ids=tuple(self.ids[index] for index in indices),
            lengths={key: [rows[i] for i in indices] for key, rows in self.lengths.items()},
            metadata={key: [rows[i] for i in indices] for key, rows in self.metadata.items()},
            data=data,
        )

    def _differs(self, other: SequenceSample) -> str:
        pairs = zip(self.ids, other.ids, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        return f"{self.bs} and {other.bs} items, first difference {first}"


def pictures_of(sample: SampleMeta) -> list[str]:
    """Return the path of each item's pictures (`tensors.pictures`); "" for no pictures."""
    found: list[str] = sample.metadata.get(METADATA, [NONE] * sample.bs)
    return found


def _join(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def _pick(tensor: Tensor, cuts: list[int], indices: Sequence[int]) -> Tensor:
    if not indices:
        return tensor[:0]
    return torch.cat([tensor[cuts[index] : cuts[index + 1]] for index in indices])
