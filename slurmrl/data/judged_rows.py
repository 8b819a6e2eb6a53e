"""Rows with judged answers to a prompt: pairs of a chosen and a rejected answer, and answers that
are labelled as desirable or not. Torch-free.

Such a row becomes several sequences, each with the whole prompt. ``RowTokens.structure`` has their
``lengths``. Of a labelled answer it also has ``desirable``, and the second of its two sequences is
the mismatched one from which KTO estimates its KL divergence: the same prompt with the answer of
the closest row before it that has another prompt, or of the first row after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.records import MOST_PROBLEMS
from slurmrl.data.row_checks import RowChecks, templates_of
from slurmrl.data.rows import Row, RowTokenizer, RowTokens
from slurmrl.data.text import wrong_text
from slurmrl.errors import ConfigError, Problem
from slurmrl.registry import near

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIR_KEYS: Final = ("chosen", "rejected")
LIST_KEYS: Final = ("pos_answers", "neg_answers")
"""ReaL's spelling of `PAIR_KEYS`."""


def pair_keys(config: DatasetConfig, row: Row) -> tuple[str, str]:
    """The keys of a row's chosen and rejected answers."""
    keys = (config.chosen_key, config.rejected_key)
    return LIST_KEYS if keys == PAIR_KEYS and set(row) & set(LIST_KEYS) else keys


def pairs(config: DatasetConfig, row: Row) -> list[tuple[str, str]]:
    """The pairs (chosen, rejected) of a checked row."""
    chosen, rejected = (_answers(row[key]) for key in pair_keys(config, row))
    return list(zip(chosen, rejected, strict=True))[: config.max_pairs_per_prompt]


class _AnswerChecks(RowChecks):
    """`RowChecks` of the prompts, and further checks of the answers."""

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._seen: set[str] = set()
        """The keys of all rows."""
        self._problems: list[Problem] = []

    def finish(self) -> None:
        missing = list(self._missing())
        if missing:
            raise ConfigError(tuple(missing))
        try:
            super().finish()
        except ConfigError as error:
            raise ConfigError((*error.problems, *self._problems)[:MOST_PROBLEMS]) from error
        if self._problems:
            raise ConfigError(tuple(self._problems))

    def _refuse(self, line: int, problems: Sequence[tuple[str, str]]) -> None:
        self.fillable = self.fillable and not problems
        where = f"{self._config.path}:{line}"
        new = [Problem(where, key, message) for key, message in problems]
        self._problems = [*self._problems, *new][:MOST_PROBLEMS]

    def _missing(self) -> Iterator[Problem]:
        """Settings that name keys that no row has."""
        return iter(())

    def _no_key(self, setting: str, key: str) -> Problem:
        message = f"'{key}' is not a key of any line of {self._config.path}"
        return Problem("", setting, f"{message}; {near(key, sorted(self._seen))}")


class PreferenceChecks(_AnswerChecks):
    """Checks rows of pairs."""

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        self._seen.update(row)
        keys = pair_keys(self._config, row)
        problems = [(key, message) for key in keys if (message := _wrong_answers(row, key))]
        if not problems:
            chosen, rejected = (len(_answers(row[key])) for key in keys)
            if chosen != rejected:
                counts = f"has {chosen} answers, but '{keys[1]}' has {rejected}"
                problems = [(keys[0], f"{counts}; each chosen answer needs a rejected one")]
        self._refuse(line, problems)
        answer = "a valid one" if problems else pairs(self._config, row)[0][0]
        super().add(line, {**row, self._config.answer_key: answer})

    def _missing(self) -> Iterator[Problem]:
        if "answer" not in templates_of(self._config)["answer_template"].fields:
            message = "must contain {answer}: chosen and rejected answers would be the same"
            yield Problem("", "answer_template", message)
        if not self._seen & set(LIST_KEYS):
            for setting in ("chosen_key", "rejected_key"):
                key = getattr(self._config, setting)
                if key not in self._seen:
                    yield self._no_key(setting, key)


class LabelChecks(_AnswerChecks):
    """Checks rows of labelled answers."""

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        self._seen.update(row)
        key = self._config.label_key
        if key not in row:
            self._refuse(line, [(key, f"missing; the line has {', '.join(row) or 'no keys'}")])
        elif not isinstance(row[key], bool):
            shown = json.dumps(row[key])
            self._refuse(line, [(key, f"must be true or false, but is {shown}")])
        super().add(line, row)

    def _missing(self) -> Iterator[Problem]:
        if self._config.label_key not in self._seen:
            yield self._no_key("label_key", self._config.label_key)


class PreferenceTokenizer(RowTokenizer):
    """The sequences of a row are those of its pairs: chosen, rejected, chosen, rejected, …"""

    def tokens(self, numbered: Sequence[tuple[int, Row]]) -> list[RowTokens | None]:
        key = self._config.answer_key
        texts = [
            [{**row, key: answer} for pair in pairs(self._config, row) for answer in pair]
            for _, row in numbered
        ]
        answers = iter(self._answers([row for rows in texts for row in rows]))
        rows = zip(self._prompts(numbered), texts, strict=True)
        return self._counted(
            [self._row(prompt, [next(answers) for _ in rows]) for prompt, rows in rows]
        )

    def _row(self, prompt: list[int], answers: Sequence[list[int]]) -> RowTokens | None:
        """The row's sequences; None if any of them is too long."""
        if not all(self._fits(len(prompt), len(answer)) for answer in answers):
            return None
        return sequences(prompt, answers)


class LabelTokenizer(RowTokenizer):
    """The sequences of a row are its own answer and the mismatched one."""

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self._before: list[RowTokens] = []
        """The newest rows of the last two different prompts."""

    def tokens(self, numbered: Sequence[tuple[int, Row]]) -> list[RowTokens | None]:
        own = super().tokens(numbered)
        return [
            None if row is None else self._with_mismatch(row, own, place, *numbered[place])
            for place, row in enumerate(own)
        ]

    def _with_mismatch(
        self, row: RowTokens, rows: Sequence[RowTokens | None], place: int, line: int, source: Row
    ) -> RowTokens:
        after = (rows[later] for later in range(place + 1, len(rows)))
        candidates = chain(reversed(self._before), after)
        differing = (other for other in candidates if other and other.prompt != row.prompt)
        mismatched = next(differing, None)
        same = self._before and self._before[-1].prompt == row.prompt
        self._before = [*(self._before[:-1] if same else self._before[-1:]), row]
        if mismatched is None:
            message = "the KL estimate of KTO needs answers to at least two different prompts"
            raise ConfigError((Problem(f"{self._config.path}:{line}", "", message),))
        most = self._config.max_tokens
        answer = mismatched.answer[: None if most is None else most - len(row.prompt)]
        desirable = source[self._config.label_key]
        return sequences(row.prompt, [row.answer, answer], desirable=desirable)


def sequences(prompt: list[int], answers: Sequence[list[int]], **labels: bool) -> RowTokens:
    """A row whose sequences are the prompt with each of the answers."""
    whole = [[*prompt, *answer] for answer in answers]
    tokens = [token for sequence in whole for token in sequence]
    structure = json.dumps({"lengths": [len(sequence) for sequence in whole], **labels})
    return RowTokens(tokens[: len(prompt)], tokens[len(prompt) :], structure.encode())


def _answers(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _wrong_answers(row: Row, key: str) -> str:
    """Why the answers under a key cannot be used; "" if they can."""
    if key not in row:
        return f"missing; the line has {', '.join(row) or 'no keys'}"
    value = row[key]
    if value == []:
        return "must not be an empty list"
    several = isinstance(value, list) and not all(isinstance(part, dict) for part in value)
    for number, answer in enumerate(value if several else [value], start=1):
        message = wrong_text(answer) or ("" if answer.strip() else "must not be empty")
        if message:
            return f"answer {number} {message}" if several else message
    return ""
