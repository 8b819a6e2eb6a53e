"""Types of rows with one sequence. Torch-free.

``prompt``: a prompt for generation, with a reference answer for the reward. ``prompt_answer``: a
prompt with the answer to learn. ``messages``: a conversation with the assistant's turns to learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slurmrl.data import conversations
from slurmrl.data.conversations import ASSISTANT, Message, as_context
from slurmrl.data.encoder import Chat, RowTokens, TokenSequence
from slurmrl.data.image_files import without_pixels
from slurmrl.data.row_images import with_media
from slurmrl.data.types import Requirement, Row, RowField, RowType, value_at, wrong_full_text

if TYPE_CHECKING:
    from slurmrl.data.encoder import Encoder


WHOLE = {"prompt": "{prompt}", "answer": "{answer}"}
"""Mapping from a field to a template with only its value; only these templates accept messages."""


class Prompts(RowType):
    """Rows with one sequence, which has no targets."""

    dataset = "slurmrl.data.dataset:PromptDataset"
    templates = ("prompt_template",)

    def fields(self) -> list[RowField]:
        fields = [conversational(self, field) for field in super().fields()]
        answer = RowField(
            self.config.answer_key,
            "answer_key",
            wrong_full_text,
            Requirement.EVERY_OR_NONE,
            name="answer",
        )
        return [*fields, answer, *tools_field(self)]

    def stored(self, row: Row, raw: bytes) -> bytes:
        if not self.config.media_keys:
            return raw
        return json.dumps(without_pixels(row)).encode()

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        if self.config.media_keys:
            chats = [(conversation(self, row), tools(self, row)) for row in rows]
            return _pictured(self, rows, chats, encoder, prompt=True)
        found = prompts(self, rows, encoder)
        return [ids if isinstance(ids, str) else [TokenSequence.of(ids, [])] for ids in found]

    def text(self, row: Row) -> str:
        """Return the prompt without the chat template; for a list of messages, the last message."""
        value = value_at(row, self.config.prompt_key)
        if self.config.is_chat and isinstance(value, list):
            return conversations.text_of(value[-1])
        return self.filled("prompt_template", row)


def conversational(kind: RowType, field: RowField) -> RowField:
    """Return the field. With a chat template, prompts and answers may also be lists of messages."""
    if field.name not in WHOLE or not kind.config.is_chat:
        return field
    wrong = {"prompt": conversations.wrong_prompt, "answer": wrong_turns}[field.name]
    return replace(field, wrong=partial(wrong_chat, kind, field.name, wrong))


def tools_field(kind: RowType) -> list[RowField]:
    if not kind.config.is_chat:
        return []
    key = kind.config.tools_key
    return [RowField(key, "tools_key", conversations.wrong_tools, Requirement.ANY)]


def prompts(kind: RowType, rows: Sequence[Row], encoder: Encoder) -> list[list[int] | str]:
    """Return the tokens of each prompt, or the reason why it has no tokens."""
    if encoder.chat is None:
        found: list[list[int] | str] = []
        found += encoder.texts([kind.filled("prompt_template", row) for row in rows], begin=True)
    else:
        found = encoder.chat_prompts([(conversation(kind, row), tools(kind, row)) for row in rows])
    return [ids if ids else encoder.no_token("prompt") for ids in found]


def conversation(kind: RowType, row: Row) -> list[dict[str, Any]]:
    """Return the messages of a prompt."""
    value = value_at(row, kind.config.prompt_key)
    if isinstance(value, list):
        return value
    return [{"role": "user", "content": kind.filled("prompt_template", row)}]


def tools(kind: RowType, row: Row) -> list[Any] | None:
    """Return the tools of the row, else the tools of the dataset; None for no tools."""
    value = value_at(row, kind.config.tools_key)
    own = value if isinstance(value, list) else kind.config.tools
    return list(own) if own else None


def conversations_of(
    kind: RowType, rows: Sequence[Row], chats: Sequence[Chat], encoder: Encoder
) -> list[RowTokens | str]:
    """Return the tokens of conversations, with the images and videos of their rows."""
    if kind.config.media_keys:
        return _pictured(kind, rows, chats, encoder, prompt=False)
    return encoder.conversations(chats)


def _pictured(
    kind: RowType, rows: Sequence[Row], chats: Sequence[Chat], encoder: Encoder, *, prompt: bool
) -> list[RowTokens | str]:
    """Return the tokens of conversations with media of their rows; see `Encoder.pictured`."""
    made: list[RowTokens | str] = []
    for row, (messages, wanted) in zip(rows, chats, strict=True):
        found = with_media(kind.config, row, messages)
        if not isinstance(found, str):
            made.append(encoder.pictured(found, wanted, prompt=prompt))
        else:
            made.append(found)
    return made


def wrong_chat(kind: RowType, name: str, wrong_messages: Callable[[Any], str], value: Any) -> str:
    """Return the problem of a field's value if it is neither a string nor messages."""
    if not isinstance(value, list):
        return wrong_full_text(value)
    setting = f"{name}_template"
    if getattr(kind.config, setting) != WHOLE[name]:
        return f"must be a string: messages are not inserted into {setting}; use {WHOLE[name]!r}"
    return wrong_messages(value)


def wrong_turns(value: Any) -> str:
    """Return why messages are not an answer to a prompt; "" if they are."""
    if reason := conversations.wrong_answer(value):
        return reason
    if conversations.begins_with_prompt(value):
        role = value[0]["role"]
        return f"must begin with a message of the assistant, but begins with '{role}'"
    return ""


class Conversations(RowType):
    """Rows with one sequence: the conversation that the chat template renders."""

    dataset = "slurmrl.data.dataset:TokenizedDataset"

    def fields(self) -> list[RowField]:
        key = self.config.messages_key
        field = RowField(key, "messages_key", conversations.wrong_conversation)
        return [field, *tools_field(self)]

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        key = self.config.messages_key
        return conversations_of(
            self, rows, [(value_at(row, key), tools(self, row)) for row in rows], encoder
        )


class PromptAnswers(RowType):
    """Rows with one sequence: prompt, answer, end-of-text token.

    Prompt and answer are tokenized separately, so that both have the same tokens as in generation.
    With a chat template, the answer is the assistant's turn, and the template writes its end. The
    answer may also be a list of messages.
    """

    dataset = "slurmrl.data.dataset:TokenizedDataset"
    templates = ("prompt_template", "answer_template")

    def fields(self) -> list[RowField]:
        fields = [conversational(self, field) for field in super().fields()]
        return [*fields, *tools_field(self)]

    def tokens(self, rows: Sequence[Row], encoder: Encoder) -> list[RowTokens | str]:
        if encoder.chat is not None:
            chats = [(self._conversation(row), tools(self, row)) for row in rows]
            return conversations_of(self, rows, chats, encoder)
        texts = [encoder.without_end(self.filled("answer_template", row)) for row in rows]
        contexts = prompts(self, rows, encoder)
        answers = encoder.answers(texts, contexts)
        return [
            ids if isinstance(ids, str) else [TokenSequence.of(ids, [*answer, encoder.end])]
            for ids, answer in zip(contexts, answers, strict=True)
        ]

    def _conversation(self, row: Row) -> list[Message]:
        """Return the messages of prompt and answer. Only the answer's turns are targets."""
        answer = value_at(row, self.config.answer_key)
        if not isinstance(answer, list):
            text = self.filled("answer_template", row)
            answer = [{"role": ASSISTANT, "content": text}]
        return [*as_context(conversation(self, row)), *answer]
