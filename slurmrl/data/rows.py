"""The texts and tokens of a dataset's rows. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.encoder import Encoder
from slurmrl.data.fields import ABSENT, value_at
from slurmrl.data.records import MOST_PROBLEMS, listed, read_records
from slurmrl.data.row_checks import RowChecks
from slurmrl.data.types import own_convert, row_type
from slurmrl.data.types.base import Row, RowTokens, RowType
from slurmrl.data.types.prompt import Prompts
from slurmrl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_ROWS = 4096
"""Rows that are tokenised together."""


class RowTokenizer:
    """Tokenises rows and leaves out those above the length limits."""

    def __init__(
        self, kind: RowType, tokenizer: PreTrainedTokenizerBase, where: Callable[[int], str]
    ) -> None:
        """``where`` gives the place of a row."""
        self.kept = 0
        self.left_out = 0
        self._kind = kind
        self._config = kind.config
        self._encoder = Encoder(kind.config, tokenizer)
        self._where = where
        self._problems: list[Problem] = []

    def tokens(self, numbered: Sequence[tuple[int, Row]]) -> list[RowTokens | None]:
        """The tokens of rows with these numbers; None for a row that is left out."""
        encoded = self._kind.tokens([row for _, row in numbered], self._encoder)
        kept: list[RowTokens | None] = []
        for (number, _), row in zip(numbered, encoded, strict=True):
            if not isinstance(row, str):
                kept.append(row if self._kind.fits(row) else None)
                continue
            kept.append(None)
            self._problems.append(Problem(self._where(number), "", row))
            if len(self._problems) == MOST_PROBLEMS:
                raise ConfigError(listed(self._problems))
        self.left_out += kept.count(None)
        self.kept += len(kept) - kept.count(None)
        return kept

    def finish(self) -> None:
        """:raises ConfigError: rows without tokens, or no row within the limits."""
        if not self._problems and not self.kept:
            message = "every row is longer than max_prompt_tokens or max_tokens allows"
            self._problems.append(Problem("", "", f"{message}: {self._config.path}"))
        if self._problems:
            raise ConfigError(listed(self._problems))


class LongRows(NamedTuple):
    """How many rows of a dataset are too long."""

    left_out: int
    """Above the length limits."""
    beyond: int
    """Others with more tokens than the models have positions."""


class DatasetRows:
    """The rows of a file in memory, each checked to have the keys of the dataset's type.

    :raises ConfigError: rows or settings that do not; each problem names its line or the setting.
    """

    def __init__(self, config: DatasetConfig, *, most_bytes: int | None = None) -> None:
        """``most_bytes``: read only the complete rows in that many bytes from the start of the
        file."""
        self._config = config
        self._kind = row_type(config)
        self.records = read_records(
            Path(config.path),
            config.id_key,
            config.split,
            most_bytes=most_bytes,
            convert=own_convert(self._kind),
        )
        checks = RowChecks(self._kind, self.records.where)
        for number, row in self._numbered():
            checks.add(number, row)
        checks.finish()

    def __len__(self) -> int:
        return len(self.records.rows)

    def prompts(self, rows: Sequence[int]) -> list[str]:
        """See `Prompts.text`."""
        assert isinstance(self._kind, Prompts)
        return [self._kind.text(self.records.rows[row]) for row in rows]

    def answers(self, rows: Sequence[int]) -> list[str]:
        """The reference answers; "" for none."""
        return [reference(self._config, self.records.rows[row]) for row in rows]

    @property
    def have_references(self) -> bool:
        """Whether the prompts have reference answers: all have one, or none."""
        return value_at(self.records.rows[0], self._config.answer_key) is not ABSENT

    def may_be_longer(self, most: int | None) -> bool:
        """Whether a row may have more than ``most`` tokens, of which None is no limit."""
        return most is not None and any(_may_be_longer(row, most) for row in self.records.rows)

    def count_long(
        self, tokenizer: PreTrainedTokenizerBase, most: int | None, *, limited: bool = True
    ) -> LongRows:
        """Tokenise all rows that are ``limited``, else those that may have more than ``most``
        tokens. Raises ConfigError, see `RowTokenizer`."""
        made = RowTokenizer(row_type(self._config), tokenizer, self.records.where)
        numbered = self._numbered()
        if not limited and most is not None:
            numbered = [(number, row) for number, row in numbered if _may_be_longer(row, most)]
        beyond = 0
        for start in range(0, len(numbered), CHUNK_ROWS):
            kept = made.tokens(numbered[start : start + CHUNK_ROWS])
            if most is not None:
                beyond += sum(_longest(row) > most for row in kept if row is not None)
        made.finish()
        return LongRows(made.left_out, beyond)

    def _numbered(self) -> list[tuple[int, Row]]:
        return list(zip(self.records.numbers, self.records.rows, strict=True))


def _may_be_longer(row: Row, most: int) -> bool:
    """A text has no more tokens than bytes, and as JSON more bytes. The other half is for what
    templates add."""
    return len(json.dumps([*row.values()])) > most // 2


def _longest(row: RowTokens) -> int:
    return max((len(sequence.tokens) for sequence in row), default=0)


def reference(config: DatasetConfig, row: Row) -> str:
    """The reference answer of a row; "" for none."""
    answer = value_at(row, config.answer_key)
    return "" if answer is ABSENT else str(answer)
