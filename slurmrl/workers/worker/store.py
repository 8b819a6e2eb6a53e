"""The batch that a rank holds: its part of the step's samples, growing a key at a time."""

from __future__ import annotations

from slurmrl.data.sample import SequenceSample


class SampleStore:
    """Samples of the current batch by id. A call takes the keys it reads and adds the keys it
    makes; the next batch replaces everything."""

    def __init__(self) -> None:
        self._sample: SequenceSample | None = None

    def replace(self, sample: SequenceSample | None) -> None:
        self._sample = sample

    @property
    def sample(self) -> SequenceSample:
        if self._sample is None:
            raise RuntimeError("no batch was loaded before this call")
        return self._sample

    def add(self, produced: SequenceSample) -> None:
        self.sample.update_(produced)

    def tokens(self, key: str = "input_ids") -> int:
        """Tokens held under ``key``; 0 when the batch has no such key yet."""
        if self._sample is None or key not in self._sample.keys:
            return 0
        return sum(sum(lengths) for lengths in self._sample.lengths[key])
