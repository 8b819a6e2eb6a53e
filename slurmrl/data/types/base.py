"""What every type of dataset says about its rows. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.template import Template
from slurmrl.data.fields import KEYS, RowField, template_fields, value_at
from slurmrl.data.messages import is_messages
from slurmrl.data.token_sequence import RowTokens
from slurmrl.errors import Problem

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder

Row = Mapping[str, Any]


class RowType(ABC):
    """The keys that a row must have, its texts, and the sequences of tokens that it becomes."""

    dataset: ClassVar[str]
    """``module:Class`` of the `data.dataset.TokenizedDataset` that makes samples of the rows."""
    templates: ClassVar[tuple[str, ...]] = ()
    """The settings with templates that the rows fill in."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self._filled = {
            setting: (Template.parse(getattr(config, setting)), template_fields(config, setting))
            for setting in self.templates
        }

    def fields(self) -> list[RowField]:
        """The keys of a row. Default: those of the templates."""
        return [field for _, fields in self._filled.values() for field in fields]

    def holds_messages(self, row: Row) -> bool:
        """Whether a row has messages where the type allows them."""
        values = (field.value(row) for field in self.message_fields())
        return any(
            is_messages(value) or (isinstance(value, list) and any(map(is_messages, value)))
            for value in values
        )

    def message_fields(self) -> list[RowField]:
        """The keys whose values may be messages."""
        return [field for field in RowType.fields(self) if field.name in KEYS]

    def difficulty(self, row: Row) -> float:
        """The number of a checked row by which a curriculum orders it."""
        key = self.config.curriculum_key
        return 0.0 if key is None else float(value_at(row, key))

    def wrong_settings(self) -> Iterator[Problem]:
        """Problems of the settings that need no row."""
        return iter(())

    def wrong_row(self, row: Row) -> tuple[str, str] | None:
        """The key of a problem between right values of a row, and the problem."""
        return None

    def stored(self, row: Row, raw: bytes) -> bytes:
        """What samples need of a row besides its tokens, as JSON. ``raw`` is the row itself."""
        return b""

    def fits(self, row: RowTokens) -> bool:
        """Whether all sequences are within the length limits."""
        most_prompt, most = self.config.max_prompt_tokens, self.config.max_tokens
        return all(
            (most_prompt is None or len(sequence.context) <= most_prompt)
            and (most is None or len(sequence.tokens) <= most)
            for sequence in row
        )

    def equal_pairs(self, row: RowTokens) -> int:
        """How many pairs of answers are the same tokens, from which nothing can be learnt."""
        return 0

    def convert(self, row: Row) -> Row:
        """A row of the file as one with the keys of the type.

        A type of a user's own overrides this; what it raises is a problem of the row.
        """
        return row

    @abstractmethod
    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        """The sequences of checked rows, or for a row that has none the reason."""

    def filled(self, setting: str, row: Row) -> str:
        """The template of a setting with the values of a row."""
        template, fields = self._filled[setting]
        return template.fill({field.name: field.value(row) for field in fields})
