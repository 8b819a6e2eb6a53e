"""Strings and tokens of a dataset's rows, and remarks on likely mistakes in them. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.encoder import Continuations, Encoder, RowTokens
from slurmrl.data.image_files import without_pixels
from slurmrl.data.records import MOST_PROBLEMS, RowChecks, listed, read_records
from slurmrl.data.row_images import has_media
from slurmrl.data.tokenizer import text_ids
from slurmrl.data.types import ABSENT, Row, RowType, own_convert, type_of_rows, value_at
from slurmrl.data.types.prompt import Prompts, conversation, tools
from slurmrl.errors import ChatTemplateError, ConfigError, Problem
from slurmrl.registry import near

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHUNK_ROWS = 4096
"""Number of rows that are tokenized together."""
IMAGE_ROWS: Final = 32
"""Number of rows with images that are prepared together, and that a submission checks."""


class RowTokenizer:
    """Tokenizes rows and leaves out rows that exceed the length limits."""

    def __init__(
        self,
        kind: RowType,
        tokenizer: PreTrainedTokenizerBase,
        where: Callable[[int], str],
        directory: Path | None = None,
    ) -> None:
        """``where`` returns the place of a row. `Encoder` describes ``directory``."""
        self.kept = 0
        self.left_out = 0
        self._kind = kind
        self._config = kind.config
        self._encoder = Encoder(kind.config, tokenizer, directory)
        self.images = self._encoder.images
        self._where = where
        self._problems: list[Problem] = []

    def tokens(self, numbered: Sequence[tuple[int, Row]]) -> list[RowTokens | None]:
        """Return the tokens of rows with these numbers; None for a row that is left out."""
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

    def require_tokens(self) -> None:
        """Raise ConfigError for rows without tokens."""
        if self._problems:
            raise ConfigError(listed(self._problems))

    def finish(self) -> None:
        """Raise ConfigError for rows without tokens, or if no row is within the limits."""
        if not self._problems and not self.kept:
            message = "every row is longer than max_prompt_tokens or max_tokens allows"
            self._problems.append(Problem("", "", f"{message}: {self._config.path}"))
        self.require_tokens()


class LongRows(NamedTuple):
    """Counts of rows of a dataset that are too long."""

    left_out: int
    """Number of rows that exceed the length limits."""
    beyond: int
    """Number of rows within these limits that have more tokens than the models have positions."""
    longest: int
    """Number of tokens of the longest row that was tokenized and kept; 0 if there is none."""
    whole: bool = True
    """Whether all rows were counted."""


class DatasetRows:
    """The rows of a file in memory, each checked to have the keys of the dataset's type.

    :raises ConfigError: rows or settings are invalid; each problem names its line or the setting.
    """

    def __init__(self, config: DatasetConfig, *, most_bytes: int | None = None) -> None:
        """If ``most_bytes`` is given, read only the complete rows in the first ``most_bytes``."""
        self._config = config
        self._kind = type_of_rows(config)
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
        """Return the prompts of rows as `Prompts.text` does."""
        assert isinstance(self._kind, Prompts)
        return [self._kind.text(self.records.rows[row]) for row in rows]

    def answers(self, rows: Sequence[int]) -> list[str]:
        """Return the reference answers of rows; "" for a row without an answer."""
        return [reference(self._config, self.records.rows[row]) for row in rows]

    def scored(self, rows: Sequence[int]) -> list[Row]:
        """Return rows as rewards receive them: with their answers, without contents of images."""
        chosen = [self.records.rows[row] for row in rows]
        if self._config.media_keys:
            chosen = [without_pixels(row) for row in chosen]
        pairs = zip(chosen, self.answers(rows), strict=True)
        return [{**row, "answer": answer} for row, answer in pairs]

    @property
    def have_references(self) -> bool:
        """Whether all prompts have reference answers; otherwise, no prompt has an answer."""
        return value_at(self.records.rows[0], self._config.answer_key) is not ABSENT

    def may_be_longer(self, most: int | None) -> bool:
        """Return whether a row may have more than ``most`` tokens; False if ``most`` is None."""
        return most is not None and any(_may_be_longer(row, most) for row in self.records.rows)

    def count_long(
        self,
        tokenizer: PreTrainedTokenizerBase,
        most: int | None,
        *,
        limited: bool = True,
        new_tokens: int = 0,
    ) -> LongRows:
        """Count the rows that are too long for the length limits, or have over ``most`` tokens.

        Without ``limited``, tokenize only the rows that may have more than ``most`` tokens with a
        completion of ``new_tokens``. In a dataset with images, which take long, tokenize only the
        first `IMAGE_ROWS` rows and count no rows above the length limits. Raises ConfigError as
        `RowTokenizer` does.
        """
        made = RowTokenizer(type_of_rows(self._config), tokenizer, self.records.where)
        numbered = self._numbered()
        has_media = bool(self._config.media_keys)
        if has_media:
            numbered = numbered[:IMAGE_ROWS]
        elif not limited and most is not None:
            least = most - new_tokens
            numbered = [(number, row) for number, row in numbered if _may_be_longer(row, least)]
        beyond = longest = 0
        for start in range(0, len(numbered), CHUNK_ROWS):
            kept = made.tokens(numbered[start : start + CHUNK_ROWS])
            lengths = [_longest(row) for row in kept if row is not None]
            longest = max([longest, *lengths])
            if most is not None:
                beyond += sum(length > most for length in lengths)
        if has_media:
            made.require_tokens()
            return LongRows(0, beyond, longest, whole=False)
        made.finish()
        return LongRows(made.left_out, beyond, longest)

    def _numbered(self) -> list[tuple[int, Row]]:
        return list(zip(self.records.numbers, self.records.rows, strict=True))


def _may_be_longer(row: Row, most: int) -> bool:
    """Return whether a row may have more than ``most`` tokens.

    A string has at most as many tokens as bytes, and fewer bytes than its JSON. Half of ``most`` is
    reserved for tokens that templates add.
    """
    return len(json.dumps([*row.values()])) > most // 2


def _longest(row: RowTokens) -> int:
    return max((len(sequence.tokens) for sequence in row), default=0)


def reference(config: DatasetConfig, row: Row) -> str:
    """Return the reference answer of a row; "" for none."""
    answer = value_at(row, config.answer_key)
    return "" if answer is ABSENT else str(answer)


ROWS: Final = 100
"""Maximum number of rows to look at."""
WORD: Final = "The"
"""A word that may follow a prompt."""
EXAMPLE: Final = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""The parts of an example tool's schema except its name."""
DATE: Final = "strftime_now"
"""Name of the function with which chat templates get the date."""


class Remark(NamedTuple):
    key: str
    """Name of a setting of the dataset."""
    message: str
    warning: bool = True


class Remarks:
    """Collects remarks about the first rows of a source."""

    def __init__(
        self,
        config: DatasetConfig,
        rows: Sequence[Row],
        tokenizer: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        """``tokenizer`` loads the tokenizer, which takes seconds."""
        self._config, self._rows = config, rows[:ROWS]
        self._kind = type_of_rows(config)
        self._load = tokenizer

    def all(
        self, called: Collection[str], without_schema: Callable[[str], str]
    ) -> Iterator[Remark]:
        """Yield a remark for each problem of the rows.

        ``called`` are the names of the episodes' tools. ``without_schema`` returns the reason why a
        tool has no JSON schema, or "". Raises ConfigError, UsageError.
        """
        for medium, key in self._config.media_keys.items():
            if any(has_media(self._config, row, medium) for row in self._rows):
                continue
            present = list(dict.fromkeys(chain.from_iterable(self._rows)))
            yield Remark(
                f"{medium}s_key",
                f"none of the first {len(self._rows)} rows has {medium}s under '{key}' or in a "
                f"message, so the model reads only text; {near(key, present)}",
            )
        if called and self._config.kind == "prompt":
            yield from self._tools(called, without_schema)
        if self._config.is_chat:
            yield from self._template()
        elif "prompt_template" in self._kind.templates:
            yield from self._white_space()

    def _template(self) -> Iterator[Remark]:
        yield from self._texts()
        chat = Encoder(self._config, self._load()).chat
        assert chat is not None, "checked by the caller"
        if self._config.kind != "prompt" and not chat.trains_end:
            message = (
                "the chat template does not end a turn with a special token of the tokenizer, so "
                "the model does not learn to stop; use a template that writes one "
                "(dataset.chat_template: FILE), or add the token to the tokenizer"
            )
            if tokens := chat.turn_end.tokens:
                message = (
                    "the chat template has generation blocks that leave out "
                    f"{tokens[0]}, which ends a turn, so the model does not learn to stop; use a "
                    "template whose blocks include it (dataset.chat_template: FILE)"
                )
            yield Remark("chat_template", message)
        if chat.uses(DATE):
            yield Remark(
                "chat_template",
                f"the chat template writes the date ({DATE}), so prompts differ from day to day; "
                "to compare trials, use a template with a fixed date",
                warning=False,
            )

    def _texts(self) -> Iterator[Remark]:
        """Yield a remark if rows with strings are between rows with messages."""
        texts = sum(not self._kind.holds_messages(row) for row in self._rows)
        if 0 < texts < len(self._rows):
            yield Remark(
                "chat_template",
                f"{texts} of the first {len(self._rows)} rows have strings, and the others have "
                "messages: each string becomes a message of the user, or the assistant's turn",
                warning=False,
            )

    def _white_space(self) -> Iterator[Remark]:
        prompts = [self._kind.filled("prompt_template", row) for row in self._rows]
        spaced = [prompt for prompt in prompts if prompt != prompt.rstrip()]
        if not spaced:
            return
        tokenizer = self._load()
        (word,) = Continuations(tokenizer).ids([WORD], [None])
        texts = text_ids(tokenizer, [prompt + WORD for prompt in spaced], begin=False)
        joined = [
            prompt for prompt, ids in zip(spaced, texts, strict=True) if ids[-len(word) :] != word
        ]
        if joined:
            yield Remark(
                "prompt_template",
                f"{len(joined)} of the first {len(prompts)} prompts end in white space "
                f"({joined[0][-12:]!r}), which the tokenizer joins to the next word: a pretrained "
                "model has not seen this; begin the answers with the white space instead",
                warning=False,
            )

    def _tools(
        self, called: Collection[str], without_schema: Callable[[str], str]
    ) -> Iterator[Remark]:
        missing = list(called)
        for text in self._prompts():
            missing = [name for name in missing if not re.search(rf"\b{re.escape(name)}\b", text)]
            if not missing:
                return
        names = ", ".join(f"'{name}'" for name in missing)
        yield Remark(
            "tools" if self._config.is_chat else "prompt_template",
            f"none of the first {len(self._rows)} prompts names the tool {names} of "
            "rollout.episode.tools, so the model calls the tool only if it was trained to; "
            f"{self._advice(missing, without_schema)}",
        )

    def _advice(self, missing: Sequence[str], without_schema: Callable[[str], str]) -> str:
        """Return advice on how to describe tools to the policy."""
        chat = Encoder(self._config, self._load()).chat
        if chat is None:
            return "describe the tools in prompt_template"
        if not chat.writes([{"type": "function", "function": {"name": missing[0], **EXAMPLE}}]):
            return (
                "the chat template writes no tools: replace it (dataset.chat_template: FILE), "
                "or describe the tools in a system prompt"
            )
        reasons = [reason for name in missing if (reason := without_schema(name))]
        if reasons and self._config.tools != ():  # `[]` is the user's choice.
            return (
                f"no JSON schema can be made ({'; '.join(reasons)}): add the missing parts, "
                "or describe the tools in dataset.tools"
            )
        return "describe the tools in dataset.tools, the rows' tools or a system prompt"

    def _prompts(self) -> Iterator[str]:
        """Yield the prompts as the policy reads them."""
        chat = Encoder(self._config, self._load()).chat if self._config.is_chat else None
        if chat is None:
            yield from (self._kind.filled("prompt_template", row) for row in self._rows)
            return
        for row in self._rows:
            with suppress(ChatTemplateError):
                yield chat.prompt(conversation(self._kind, row), tools(self._kind, row))
