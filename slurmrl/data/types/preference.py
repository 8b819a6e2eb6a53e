"""Types of rows with two sequences. Torch-free.

``preference``: a chosen and a rejected answer to a prompt. ``kto``: an answer that is labeled as
desirable or not. The second sequence of a ``kto`` row is a mismatched answer, from which KTO
estimates its KL divergence. This sequence has the prompt of the row and the answer of a row with
another prompt: the last such row before it, or else the first one after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import (
    Message,
    begins_with_prompt,
    common_prompt,
    is_messages,
    text_of,
    wrong_answer,
)
from slurmrl.data.encoder import RowTokens, TokenSequence
from slurmrl.data.types import ABSENT, Requirement, Row, RowField, value_at, wrong_full_text
from slurmrl.data.types.prompt import WHOLE, PromptAnswers, wrong_chat
from slurmrl.errors import Problem

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder


REAL_KEYS: Final = {"chosen": "pos_answers", "rejected": "neg_answers"}
"""ReaL's names of the default keys, which a row may have instead."""


class Preferences(PromptAnswers):
    """Rows of preference pairs.

    The sequences of a row are the sequences of its pairs, each with the whole prompt: chosen,
    rejected, chosen, rejected, … If a chat template is applied, an answer may be a list of
    messages: the turns after the prompt, or the whole conversation. The prompt of whole
    conversations is their common beginning.
    """

    dataset = "slurmrl.data.dataset:TokenizedDataset"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        chosen, rejected = config.chosen_key, config.rejected_key
        real = REAL_KEYS if (chosen, rejected) == tuple(REAL_KEYS) else {}
        self._chosen, self._rejected = (
            RowField(key, f"{setting}_key", self._wrong_answers, other=real.get(key, ""))
            for setting, key in (("chosen", chosen), ("rejected", rejected))
        )

    def fields(self) -> list[RowField]:
        fields = [field for field in super().fields() if field.name != "answer"]
        if self._takes_conversations:
            fields = [
                replace(field, requirement=Requirement.ANY) if field.name == "prompt" else field
                for field in fields
            ]
        return [*fields, self._chosen, self._rejected]

    def message_fields(self) -> list[RowField]:
        fields = [field for field in super().message_fields() if field.name != "answer"]
        return [*fields, self._chosen, self._rejected]

    def wrong_settings(self) -> Iterator[Problem]:
        if all(field.name != "answer" for field in super().fields()):
            message = "must contain {answer}: chosen and rejected answers would be the same"
            yield Problem("", "answer_template", message)

    def wrong_row(self, row: Row) -> tuple[str, str] | None:
        for field in self._both():
            if field.is_double(row):
                return field.key, f"and '{field.other}' are both present; remove one of them"
        chosen, rejected = (_answers(each.value(row)) for each in self._both())
        keys = [field.key_in(row) for field in self._both()]
        if len(chosen) != len(rejected):
            counts = f"has {len(chosen)} answers, but '{keys[1]}' has {len(rejected)}"
            return keys[0], f"{counts}; each chosen answer needs a rejected answer"
        if self._takes_conversations:
            for pair in zip(chosen, rejected, strict=True):
                if problem := self._wrong_conversations(row, *pair):
                    return problem
        return None

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        answered = [[*chain.from_iterable(self._answered(row))] for row in rows]
        made = iter(super().tokens([*chain.from_iterable(answered)], encoder))
        return [joined([next(made) for _ in answers]) for answers in answered]

    def equal_pairs(self, row: RowTokens) -> int:
        return sum(
            chosen.tokens == rejected.tokens
            for chosen, rejected in zip(row[::2], row[1::2], strict=True)
        )

    def _answered(self, row: Row) -> Iterator[tuple[Row, Row]]:
        """Return a row with the chosen and a row with the rejected answer, for each pair."""
        values = (_answers(field.value(row)) for field in self._both())
        pairs = islice(zip(*values, strict=True), self.config.max_pairs_per_prompt)
        for chosen, rejected in pairs:
            prompt: Sequence[Message] = []
            if begins_with_prompt(chosen) and self.config.is_chat:
                prompt = common_prompt(chosen, rejected)
            own = {self.config.prompt_key: prompt} if prompt else {}
            yield (
                {**row, **own, self.config.answer_key: chosen[len(prompt) :]},
                {**row, **own, self.config.answer_key: rejected[len(prompt) :]},
            )

    @property
    def _takes_conversations(self) -> bool:
        """Whether answers may be whole conversations."""
        templates = {name: getattr(self.config, f"{name}_template") for name in WHOLE}
        return self.config.is_chat and templates == WHOLE

    def _wrong_conversations(self, row: Row, chosen: Any, rejected: Any) -> tuple[str, str] | None:
        """Return a problem of two whole conversations, or of two answers without a prompt."""
        whole = [begins_with_prompt(answer) for answer in (chosen, rejected)]
        keys = [field.key_in(row) for field in self._both()]
        prompt = value_at(row, self.config.prompt_key)
        if not any(whole):
            if prompt is not ABSENT:
                return None
            return self.config.prompt_key, f"is missing; the line has the keys {', '.join(row)}"
        if not all(whole):
            first, other = keys if whole[0] else reversed(keys)
            return first, f"is a whole conversation, but '{other}' is only an answer"
        common = common_prompt(chosen, rejected)
        rest = [answer[len(common) :] for answer in (chosen, rejected)]
        if not all(rest):
            return keys[0], f"and '{keys[1]}' are the same, or one is the beginning of the other"
        if any(begins_with_prompt(answer) for answer in rest):
            where = f"first differs from '{keys[1]}' in message {len(common) + 1}"
            return keys[0], f"{where}, which must be an assistant message in both"
        if isinstance(prompt, list) and prompt != common[: len(prompt)]:
            return keys[0], f"and '{keys[1]}' do not begin with the messages of the prompt"
        if isinstance(prompt, str) and not any(
            prompt.strip() in text_of(message) for message in common
        ):
            where = f"the messages with which '{keys[0]}' and '{keys[1]}' begin"
            return (
                self.config.prompt_key,
                f"is in none of {where}; remove '{self.config.prompt_key}' or add it there",
            )
        return None

    def _wrong_answers(self, value: Any) -> str:
        """Return why a value is neither an answer nor a list of answers."""
        if value == []:
            return "must not be an empty list"
        answers = _answers(value)
        for number, answer in enumerate(answers, start=1):
            message = wrong_full_text(answer)
            if self.config.is_chat:
                message = wrong_chat(self, "answer", wrong_answer, answer)
            if message:
                return f"answer {number} {message}" if answers is value else message
        return ""

    def _both(self) -> tuple[RowField, RowField]:
        return self._chosen, self._rejected


def joined(rows: Sequence[RowTokens | str]) -> RowTokens | str:
    """Return the sequences of all rows in a list, or the first reason for missing sequences."""
    sequences: list[TokenSequence] = []
    for row in rows:
        if isinstance(row, str):
            return row
        sequences += row
    return sequences


def _answers(value: Any) -> list[Any]:
    """Return the answers under a key: strings or lists of messages."""
    return value if isinstance(value, list) and not is_messages(value) else [value]


ONE_PROMPT = "the KL estimate of KTO needs answers to at least two different prompts"


class LabelledAnswers(PromptAnswers):
    """Rows of labeled answers. A row has two sequences: its answer and a mismatched answer."""

    dataset = "slurmrl.data.dataset:LabelledDataset"

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._before: list[TokenSequence] = []
        """The newest row of each of the last two distinct prompts."""

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
