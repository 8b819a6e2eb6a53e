"""The usable rows of one source, checked and tokenised in chunks. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.records import MOST_PROBLEMS, NumberedRow, RecordReader
from slurmrl.data.row_checks import RowChecks
from slurmrl.data.rows import CHUNK_ROWS, RowTokenizer
from slurmrl.data.types import own_convert, row_type
from slurmrl.data.types.base import RowTokens
from slurmrl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str], None]
"""Receives what is being done: ``tokenising rows.jsonl, 34 % (340000 rows)``."""

CHUNK_BYTES: Final = 16 << 20


class TokenReader:
    """Iterate over it to the end, then call `finish`. Memory grows by 8 bytes a row only.

    Raises as `RecordReader` does.
    """

    def __init__(
        self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase, progress: Progress
    ) -> None:
        self.kind = row_type(config)
        self.records = RecordReader(
            Path(config.path), config.id_key, config.split, convert=own_convert(self.kind)
        )
        self._checks = RowChecks(self.kind, self.records.where)
        self._tokens = RowTokenizer(self.kind, tokenizer, self.records.where)
        self._progress = progress

    @property
    def left_out(self) -> int:
        """Rows above the length limits."""
        return self._tokens.left_out

    def __iter__(self) -> Iterator[tuple[NumberedRow, RowTokens]]:
        """Yield the rows within the length limits. Once a row is wrong, no more rows are yielded,
        but all are read for their problems."""
        name = self.records.source.path.name
        for chunk in self._chunks():
            done = f"{self.records.share:.0%} ({self.records.rows} rows)"
            self._progress(f"tokenising {name}, {done}")
            for record in chunk:
                self._checks.add(record.number, record.row)
            if self._checks.fillable:
                made = self._tokens.tokens([(record.number, record.row) for record in chunk])
                for record, row in zip(chunk, made, strict=True):
                    if row is not None:
                        yield record, row

    def finish(self) -> None:
        """:raises ConfigError: rows or settings that cannot be used; each problem names its
        line."""
        problems: list[Problem] = []
        for part in (self.records, self._checks):
            try:
                part.finish()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
        self._tokens.finish()

    def _chunks(self) -> Iterator[list[NumberedRow]]:
        chunk: list[NumberedRow] = []
        size = 0
        for record in self.records:
            chunk.append(record)
            size += len(record.raw)
            if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
