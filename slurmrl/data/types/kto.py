"""Type ``kto``: answers that are labelled as desirable or not. Torch-free.

The second sequence of a row is the mismatched one from which KTO estimates its KL divergence: the
same prompt with the answer of the closest row before it that has another prompt, or of the first
row after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.row_fields import RowField
from slurmrl.data.types.base import Row, RowTokens, TokenSequence
from slurmrl.data.types.prompt_answer import PromptAnswers

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder

ONE_PROMPT = "the KL estimate of KTO needs answers to at least two different prompts"


class LabelledAnswers(PromptAnswers):
    """The sequences of a row are its own answer and the mismatched one."""

    dataset = "slurmrl.data.dataset:LabelledDataset"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._before: list[TokenSequence] = []
        """The newest rows of the last two different prompts."""

    def fields(self) -> list[RowField]:
        return [*super().fields(), RowField(self.config.label_key, "label_key", _wrong_label)]

    def stored(self, row: Row, raw: bytes) -> bytes:
        return json.dumps({"desirable": self._label(row)}).encode()

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        own = super().tokens(rows, encoder)
        usable = [None if isinstance(row, str) or not self.fits(row) else row[0] for row in own]
        return [
            row if sequence is None else self._with_mismatch(sequence, usable[place + 1 :])
            for place, (row, sequence) in enumerate(zip(own, usable, strict=True))
        ]

    def _with_mismatch(
        self, own: TokenSequence, after: Sequence[TokenSequence | None]
    ) -> RowTokens | str:
        candidates = chain(reversed(self._before), after)
        differing = (other for other in candidates if other and other.context != own.context)
        mismatched = next(differing, None)
        same = self._before and self._before[-1].context == own.context
        self._before = [*(self._before[:-1] if same else self._before[-1:]), own]
        if mismatched is None:
            return ONE_PROMPT
        return [own, mismatched.after(own.context).cut(self.config.max_tokens)]

    def _label(self, row: Row) -> Any:
        return next(field.value(row) for field in self.fields() if field.setting == "label_key")


def _wrong_label(value: Any) -> str:
    return "" if isinstance(value, bool) else f"must be true or false, but is {json.dumps(value)}"
