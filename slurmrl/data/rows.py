"""The texts and tokens of a dataset's rows. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.records import MOST_PROBLEMS, read_records
from slurmrl.data.row_checks import RowChecks, key_of, templates_of
from slurmrl.data.tokenizer import end_id, text_ids
from slurmrl.errors import ConfigError, Problem
from slurmrl.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
CHUNK_ROWS = 4096
"""Rows that are tokenised together."""


class RowTexts:
    """Fills in the templates with checked rows."""

    def __init__(self, config: DatasetConfig) -> None:
        self._answer_key = config.answer_key
        self._templates = {
            name: (template, {field: key_of(config, field) for field in template.fields})
            for name, template in templates_of(config).items()
        }

    @property
    def have_targets(self) -> bool:
        """Whether the answers are to be learnt (``prompt_answer``)."""
        return "answer_template" in self._templates

    def prompts(self, rows: Sequence[Row]) -> list[str]:
        return self._fill("prompt_template", rows)

    def answers(self, rows: Sequence[Row]) -> list[str]:
        """The target answers (``prompt_answer``) or the prompts' reference answers; "" for none."""
        if self.have_targets:
            return self._fill("answer_template", rows)
        return [row.get(self._answer_key, "") for row in rows]

    def _fill(self, name: str, rows: Sequence[Row]) -> list[str]:
        template, keys = self._templates[name]
        return [template.fill({field: row[key] for field, key in keys.items()}) for row in rows]


class RowTokens(NamedTuple):
    prompt: list[int]
    answer: list[int]
    """With the end-of-text token; empty in a dataset of prompts."""
    structure: bytes = b""
    """What else is stored with the tokens, as JSON (see `judged_rows`)."""


class RowTokenizer:
    """Tokenises rows and leaves out those above the length limits."""

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.kept = 0
        self.left_out = 0
        self._config = config
        self._texts = RowTexts(config)
        self._tokenizer = tokenizer
        self._problems: list[Problem] = []

    def tokens(self, numbered: Sequence[tuple[int, Row]]) -> list[RowTokens | None]:
        """The tokens of rows with these line numbers; None for a row that is left out."""
        prompts, answers = self._prompts(numbered), self._answers([row for _, row in numbered])
        return self._counted(
            [
                RowTokens(*both) if self._fits(*map(len, both)) else None
                for both in zip(prompts, answers, strict=True)
            ]
        )

    def _prompts(self, numbered: Sequence[tuple[int, Row]]) -> list[list[int]]:
        texts = self._texts.prompts([row for _, row in numbered])
        prompts = text_ids(self._tokenizer, texts, begin=True)
        for (line, _), prompt in zip(numbered, prompts, strict=True):
            if not prompt and len(self._problems) < MOST_PROBLEMS:
                message = f"the tokenizer {self._tokenizer.name_or_path} makes no token of this"
                where = f"{self._config.path}:{line}"
                self._problems.append(Problem(where, "", f"{message} prompt"))
        return prompts

    def _answers(self, rows: Sequence[Row]) -> list[list[int]]:
        """The answers' tokens with the end-of-text token; empty in a dataset of prompts."""
        if not self._texts.have_targets:
            return [[] for _ in rows]
        end = end_id(self._tokenizer)
        texts = text_ids(self._tokenizer, self._texts.answers(rows), begin=False)
        return [[*ids, end] for ids in texts]

    def _counted(self, rows: list[RowTokens | None]) -> list[RowTokens | None]:
        left_out = rows.count(None)
        self.left_out += left_out
        self.kept += len(rows) - left_out
        return rows

    def finish(self) -> None:
        """:raises ConfigError: prompts without tokens, or no row within the limits."""
        if not self._problems and not self.kept:
            message = "every row is longer than max_prompt_tokens or max_tokens allows"
            self._problems.append(Problem(self._config.path, "dataset", message))
        if self._problems:
            raise ConfigError(tuple(self._problems))

    def _fits(self, prompt: int, answer: int) -> bool:
        most_prompt, most = self._config.max_prompt_tokens, self._config.max_tokens
        fits = most_prompt is None or prompt <= most_prompt
        return fits and (most is None or prompt + answer <= most)


CHECKS = Registry(
    "row check",
    {
        "prompt": "slurmrl.data.row_checks:RowChecks",
        "prompt_answer": "slurmrl.data.row_checks:RowChecks",
        "preference": "slurmrl.data.judged_rows:PreferenceChecks",
        "kto": "slurmrl.data.judged_rows:LabelChecks",
    },
)
TOKENIZERS = Registry(
    "row tokenizer",
    {
        "prompt": "slurmrl.data.rows:RowTokenizer",
        "prompt_answer": "slurmrl.data.rows:RowTokenizer",
        "preference": "slurmrl.data.judged_rows:PreferenceTokenizer",
        "kto": "slurmrl.data.judged_rows:LabelTokenizer",
    },
)


def row_checks(config: DatasetConfig) -> RowChecks:
    """The checks for rows of the dataset's type."""
    checks: RowChecks = CHECKS.load(config.type)(config)
    return checks


def row_tokenizer(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> RowTokenizer:
    """The tokenizer for rows of the dataset's type."""
    made: RowTokenizer = TOKENIZERS.load(config.type)(config, tokenizer)
    return made


class DatasetRows:
    """The lines of a file in memory, each checked to fill in the templates.

    :raises ConfigError: lines or settings that do not; each problem names its line or the setting.
    """

    def __init__(self, config: DatasetConfig, *, most_bytes: int | None = None) -> None:
        """``most_bytes``: read only the complete lines in that many bytes from the start of the
        file."""
        self._config = config
        self._texts = RowTexts(config)
        self.records = read_records(Path(config.path), config.id_key, most_bytes=most_bytes)
        checks = row_checks(config)
        for line, row in self._numbered():
            checks.add(line, row)
        checks.finish()

    def __len__(self) -> int:
        return len(self.records.rows)

    def prompts(self, rows: Sequence[int]) -> list[str]:
        return self._texts.prompts([self.records.rows[row] for row in rows])

    def answers(self, rows: Sequence[int]) -> list[str]:
        """See `RowTexts.answers`."""
        return self._texts.answers([self.records.rows[row] for row in rows])

    @property
    def have_references(self) -> bool:
        """Whether the prompts have reference answers: all have one, or none."""
        return self._config.answer_key in self.records.rows[0]

    def count_left_out(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """The number of rows above the length limits. Raises ConfigError, see `RowTokenizer`."""
        made = row_tokenizer(self._config, tokenizer)
        numbered = self._numbered()
        for start in range(0, len(numbered), CHUNK_ROWS):
            made.tokens(numbered[start : start + CHUNK_ROWS])
        made.finish()
        return made.left_out

    def _numbered(self) -> list[tuple[int, Row]]:
        return list(zip(self.records.lines, self.records.rows, strict=True))
