"""Traps in usable data, which the checks of a configuration tell. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.continuation import Continuations
from slurmrl.data.encoder import Encoder
from slurmrl.data.tokenizer import text_ids
from slurmrl.data.types import row_type
from slurmrl.data.types.base import Row
from slurmrl.data.types.prompt import conversation, tools
from slurmrl.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS: Final = 100
"""Most rows to look at."""
WORD: Final = "The"
"""A word that may follow a prompt."""
EXAMPLE: Final = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""The rest of a tool's schema."""
DATE: Final = "strftime_now"
"""The function of chat templates that gives the date."""


class Remark(NamedTuple):
    key: str
    """Setting of the dataset."""
    message: str
    warning: bool = True


class Remarks:
    """Looks at the first rows of a source."""

    def __init__(
        self,
        config: DatasetConfig,
        rows: Sequence[Row],
        tokenizer: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        """``tokenizer`` loads the tokenizer, which takes seconds."""
        self._config, self._rows = config, rows[:ROWS]
        self._kind = row_type(config)
        self._load = tokenizer

    def all(
        self, called: Collection[str], without_schema: Callable[[str], str]
    ) -> Iterator[Remark]:
        """Return the remarks. ``called`` are the names of the episodes' tools; ``without_schema``
        says why one has no JSON schema. Raises ConfigError, UsageError."""
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
        if self._config.kind != "prompt" and not chat.turn_end.tokens:
            yield Remark(
                "chat_template",
                "the chat template ends a turn with no special token of the tokenizer, so the "
                "model does not learn to stop; use a template that writes one "
                "(dataset.chat_template: FILE), or add the token to the tokenizer",
            )
        if chat.uses(DATE):
            yield Remark(
                "chat_template",
                f"the chat template writes the date ({DATE}): a trial of another day has other "
                "prompts; compare trials with a template that writes a fixed date",
                warning=False,
            )

    def _texts(self) -> Iterator[Remark]:
        """Yield a remark where rows of text are between rows of messages."""
        texts = sum(not self._kind.holds_messages(row) for row in self._rows)
        if 0 < texts < len(self._rows):
            yield Remark(
                "chat_template",
                f"{texts} of the first {len(self._rows)} rows have text and the others messages: "
                "each text becomes a message of the user, or the assistant's turn",
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
            "rollout.episode.tools, so only a model that was trained to call it does; "
            f"{self._advice(missing, without_schema)}",
        )

    def _advice(self, missing: Sequence[str], without_schema: Callable[[str], str]) -> str:
        """How to describe tools to the policy."""
        chat = Encoder(self._config, self._load()).chat
        if chat is None:
            return "describe the tools in prompt_template"
        if not chat.writes([{"type": "function", "function": {"name": missing[0], **EXAMPLE}}]):
            return (
                "the chat template writes no tools: use another one (dataset.chat_template: FILE), "
                "or describe the tools in a system prompt"
            )
        reasons = [reason for name in missing if (reason := without_schema(name))]
        if reasons and self._config.tools != ():  # `[]` asks for no schemas
            return (
                f"no JSON schema can be made ({'; '.join(reasons)}): add what is missing, "
                "or describe the tools in dataset.tools"
            )
        return "describe the tools in dataset.tools, the rows' tools or a system prompt"

    def _prompts(self) -> Iterator[str]:
        """The prompts as the policy reads them."""
        if not self._config.is_chat:
            yield from (self._kind.filled("prompt_template", row) for row in self._rows)
            return
        chat = Encoder(self._config, self._load()).chat
        assert chat is not None, "checked above"
        for row in self._rows:
            with suppress(ChatTemplateError):
                yield chat.prompt(conversation(self._kind, row), tools(self._kind, row))
