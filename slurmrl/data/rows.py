"""The checked lines of a dataset and the texts made from them. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.template import DOUBLING, Template
from slurmrl.data.records import MOST_PROBLEMS, Records, read_records
from slurmrl.data.text import wrong_text
from slurmrl.data.tokenizer import end_id, text_ids
from slurmrl.errors import ConfigError, Problem
from slurmrl.registry import near

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("prompt_template",),
    "prompt_answer": ("prompt_template", "answer_template"),
}
"""The templates that each type of dataset fills in."""
KEYS: Final[Mapping[str, str]] = {"prompt": "prompt_key", "answer": "answer_key"}
"""The settings with the line's key for a template field."""


class DatasetRows:
    """The lines of a file, each checked to fill in the templates.

    :raises ConfigError: lines or settings that do not; each problem names its line or the setting.
    """

    def __init__(self, config: DatasetConfig, *, most_bytes: int | None = None) -> None:
        """``most_bytes``: read only the complete lines in that many bytes from the start of the
        file."""
        self._config = config
        self.records = read_records(Path(config.path), config.id_key, most_bytes=most_bytes)
        self._templates = {
            name: Template.parse(getattr(config, name)) for name in TEMPLATES[config.type]
        }
        problems = list(_problems(config, self.records, self._templates))
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))

    def __len__(self) -> int:
        return len(self.records.rows)

    def prompts(self, rows: Sequence[int]) -> list[str]:
        return self._texts("prompt_template", rows)

    def answers(self, rows: Sequence[int]) -> list[str]:
        """The target answers (``prompt_answer``) or the prompts' reference answers; "" for none."""
        if "answer_template" in self._templates:
            return self._texts("answer_template", rows)
        return [self.records.rows[row].get(self._config.answer_key, "") for row in rows]

    @property
    def have_references(self) -> bool:
        """Whether the prompts have reference answers: all have one, or none."""
        return self._config.answer_key in self.records.rows[0]

    def prompt_ids(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]
    ) -> list[list[int]]:
        """Tokens of the prompts. Raises ConfigError for prompts without tokens."""
        prompts = text_ids(tokenizer, self.prompts(rows), begin=True)
        message = f"the tokenizer {tokenizer.name_or_path} makes no token of this prompt"
        problems = [
            Problem(self._where(row), "", message)
            for row, ids in zip(rows, prompts, strict=True)
            if not ids
        ]
        if problems:
            raise ConfigError(tuple(problems[:MOST_PROBLEMS]))
        return prompts

    def answer_ids(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[int]
    ) -> list[list[int]]:
        """Tokens of the target answers with the end-of-text token; none in a dataset of prompts."""
        if "answer_template" not in self._templates:
            return [[] for _ in rows]
        end = end_id(tokenizer)
        return [[*ids, end] for ids in text_ids(tokenizer, self.answers(rows), begin=False)]

    def usable(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The rows within the length limits. Without limits nothing is tokenised.

        Raises ConfigError if all rows are too long.
        """
        rows = range(len(self))
        most_prompt, most = self._config.max_prompt_tokens, self._config.max_tokens
        if most_prompt is None and most is None:
            return list(rows)
        prompts, answers = self.prompt_ids(tokenizer, rows), self.answer_ids(tokenizer, rows)
        usable = [
            row
            for row, prompt, answer in zip(rows, prompts, answers, strict=True)
            if (most_prompt is None or len(prompt) <= most_prompt)
            and (most is None or len(prompt) + len(answer) <= most)
        ]
        if not usable:
            message = "every row is longer than max_prompt_tokens or max_tokens allows"
            raise ConfigError((Problem(self._config.path, "dataset", message),))
        return usable

    def _texts(self, name: str, rows: Sequence[int]) -> list[str]:
        template = self._templates[name]
        keys = {field: _key(self._config, field) for field in template.fields}
        lines = (self.records.rows[row] for row in rows)
        return [template.fill({name: line[key] for name, key in keys.items()}) for line in lines]

    def _where(self, row: int) -> str:
        return f"{self._config.path}:{self.records.lines[row]}"


def _key(config: DatasetConfig, field: str) -> str:
    """The line's key for a field of a template."""
    return str(getattr(config, KEYS[field])) if field in KEYS else field


def _problems(
    config: DatasetConfig, records: Records, templates: Mapping[str, Template]
) -> Iterator[Problem]:
    """A key that no line has is a problem of the setting, one that some lack is one of those."""
    count = Counter(key for row in records.rows for key in row)
    wanted: dict[str, str] = {}
    for name, template in templates.items():
        for field in template.fields:
            key = _key(config, field)
            wanted.setdefault(key, field)
            if key not in count:
                yield _no_such_key(config, name, field, list(count))
    if config.answer_key in count:
        wanted.setdefault(config.answer_key, "answer")
    elif config.answer_key != "answer" and config.answer_key not in wanted:
        yield _no_such_key(config, "answer_key", "answer", list(count))
    known = {key: field not in KEYS for key, field in wanted.items() if key in count}
    for line, row in zip(records.lines, records.rows, strict=True):
        where = f"{config.path}:{line}"
        wrong = {key: _wrong(row, key, empty=empty) for key, empty in known.items()}
        yield from (Problem(where, key, message) for key, message in wrong.items() if message)
        if not any(wrong.values()) and known and not any(row[key].strip() for key in known):
            yield Problem(where, ", ".join(known), "must not all be empty")


def _no_such_key(config: DatasetConfig, setting: str, field: str, known: list[str]) -> Problem:
    """``setting`` contains the field; for a field of KEYS, another setting names the key."""
    key = _key(config, field)
    if field in KEYS:
        message = f"{{{field}}} inserts '{key}', which is not a key of any line of {config.path}"
        return Problem("", KEYS[field], f"{message}; {near(key, known)}")
    fields = list(dict.fromkeys([*known, *KEYS]))
    message = f"'{key}' is not a key of any line of {config.path}; {near(key, fields)}"
    return Problem("", setting, f"{message}; {DOUBLING}")


def _wrong(row: Mapping[str, Any], key: str, *, empty: bool) -> str:
    """Why a line's value cannot be inserted; "" if it can. ``empty`` allows an empty text."""
    if key not in row:
        return f"missing; the line has {', '.join(row) or 'no keys'}"
    return wrong_text(row[key]) or ("" if empty or row[key].strip() else "must not be empty")
