"""Type ``preference``: pairs of a chosen and a rejected answer to a prompt. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.row_fields import RowField, wrong_full_text
from slurmrl.data.types.base import Row, RowTokens, TokenSequence
from slurmrl.data.types.prompt_answer import PromptAnswers
from slurmrl.errors import Problem

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder

REAL_KEYS: Final = {"chosen": "pos_answers", "rejected": "neg_answers"}
"""ReaL's spelling of the default keys, which a row may have in their place."""


class Preferences(PromptAnswers):
    """The sequences of a row are those of its pairs, each with the whole prompt: chosen, rejected,
    chosen, rejected, …"""

    dataset = "slurmrl.data.dataset:TokenizedDataset"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        chosen, rejected = config.chosen_key, config.rejected_key
        real = REAL_KEYS if (chosen, rejected) == tuple(REAL_KEYS) else {}
        self._chosen, self._rejected = (
            RowField(key, f"{setting}_key", _wrong_answers, other=real.get(key, ""))
            for setting, key in (("chosen", chosen), ("rejected", rejected))
        )

    def fields(self) -> list[RowField]:
        fields = [field for field in super().fields() if field.name != "answer"]
        return [*fields, self._chosen, self._rejected]

    def wrong_settings(self) -> Iterator[Problem]:
        if all(field.name != "answer" for field in super().fields()):
            message = "must contain {answer}: chosen and rejected answers would be the same"
            yield Problem("", "answer_template", message)

    def wrong_row(self, row: Row) -> tuple[str, str] | None:
        chosen, rejected = (len(_answers(each.value(row))) for each in self._both())
        if chosen == rejected:
            return None
        keys = [field.key_in(row) for field in self._both()]
        counts = f"has {chosen} answers, but '{keys[1]}' has {rejected}"
        return keys[0], f"{counts}; each chosen answer needs a rejected one"

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        texts = [[*chain.from_iterable(self._pairs(row))] for row in rows]
        whole = [
            {**row, self.config.answer_key: answer}
            for row, answers in zip(rows, texts, strict=True)
            for answer in answers
        ]
        made = iter(super().tokens(whole, encoder))
        return [joined([next(made) for _ in answers]) for answers in texts]

    def _pairs(self, row: Row) -> list[tuple[str, str]]:
        chosen, rejected = (_answers(field.value(row)) for field in self._both())
        return list(zip(chosen, rejected, strict=True))[: self.config.max_pairs_per_prompt]

    def _both(self) -> tuple[RowField, RowField]:
        return self._chosen, self._rejected


def joined(rows: Sequence[RowTokens | str]) -> RowTokens | str:
    """The sequences of all rows as those of one, or the first reason why there are none."""
    sequences: list[TokenSequence] = []
    for row in rows:
        if isinstance(row, str):
            return row
        sequences += row
    return sequences


def _answers(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _wrong_answers(value: Any) -> str:
    """Why a value is neither an answer nor a list of answers."""
    if value == []:
        return "must not be an empty list"
    several = isinstance(value, list) and not all(isinstance(part, dict) for part in value)
    for number, answer in enumerate(value if several else [value], start=1):
        if message := wrong_full_text(answer):
            return f"answer {number} {message}" if several else message
    return ""
