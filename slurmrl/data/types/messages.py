"""Type ``messages``: conversations with the assistant's turns to learn. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurmrl.data import messages
from slurmrl.data.fields import value_at
from slurmrl.data.row_fields import RowField
from slurmrl.data.types import prompt
from slurmrl.data.types.base import Row, RowTokens, RowType

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder


class Conversations(RowType):
    """One sequence: the conversation as the chat template renders it."""

    dataset = "slurmrl.data.dataset:TokenizedDataset"

    def fields(self) -> list[RowField]:
        key = self.config.messages_key
        field = RowField(key, "messages_key", messages.wrong_conversation)
        return [field, *prompt.tools_field(self)]

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        key = self.config.messages_key
        return encoder.conversations(
            [(value_at(row, key), prompt.tools(self, row)) for row in rows]
        )
