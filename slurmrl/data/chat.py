"""Chat templates: the text of a conversation, and which parts of it the assistant writes.
Torch-free, except for what transformers imports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.messages import ASSISTANT, Message, is_target, text_of, with_system
from slurmrl.errors import ChatTemplateError, ConfigError, Problem
from slurmrl.fsio import inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKED_BLOCKS: Final = ("{% generation %}", "{%- generation %}", "{% generation -%}")
OTHER_TEXT: Final = "Something else."
TURN_TEXT: Final = "The turn before."


class MarkedText(NamedTuple):
    text: str
    targets: Sequence[tuple[int, int]]
    """The parts that the assistant writes, as ranges of characters, in order."""


class ChatTemplate:
    """The chat template of a dataset: the tokenizer's, or that of a file.

    Methods raise ChatTemplateError for a conversation that the template refuses, or whose turns
    cannot be told apart.
    """

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._options = config.chat_template_options
        self._system = config.system_prompt
        self._file = _file_of(config)
        if not tokenizer.is_fast and config.kind != "prompt":
            message = f"the tokenizer {tokenizer.name_or_path} has no tokenizer.json, without which"
            message = f"{message} the assistant's tokens cannot be found in a conversation"
            raise ConfigError((Problem("", "chat_template", message),))

    def prompt(self, messages: Sequence[Message], tools: Any) -> str:
        """The text of a prompt, with the beginning of the assistant's turn."""
        return self._render(self._whole(messages), tools, generate=True)

    def conversation(self, messages: Sequence[Message], tools: Any) -> MarkedText:
        """The text of a whole conversation. A turn begins after the generation prompt, and ends
        with what the template puts after it, except white space after a special token."""
        messages = self._whole(messages)
        if any(block in self._template(tools) for block in MARKED_BLOCKS):
            return self._marked_by_template(messages, tools)
        text = self._render(messages, tools)
        targets = []
        for place, message in enumerate(messages):
            if is_target(message):
                first, last = self._turn(text, messages, place, tools)
                targets.append((first, self._trimmed(text, first, last)))
        return MarkedText(text, targets)

    def around_messages(self, roles: Sequence[str]) -> list[str]:
        """What the template puts between the text of the assistant's turn and that of a message
        behind it, between this and each further message of these ``roles``, and between the last
        one and the next turn of the assistant."""
        texts = [f"{OTHER_TEXT} {number}." for number in range(len(roles))]
        messages: list[Message] = [
            {"role": "user", "content": "Hello."},
            {"role": ASSISTANT, "content": TURN_TEXT},
            *({"role": role, "content": text} for role, text in zip(roles, texts, strict=True)),
        ]
        rest = self._render(with_system(messages, self._system), None, generate=True)
        pieces = []
        for text in (TURN_TEXT, *texts):
            piece, found, rest = rest.partition(text)
            if not found:
                raise ChatTemplateError(
                    f"the chat template leaves out a message with one of the roles "
                    f"{', '.join(roles)} behind a turn of the assistant, or the turn itself; use "
                    "another role"
                )
            pieces.append(piece)
        return [*pieces[1:], rest]

    def _whole(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with the system prompt, and with contents that the template can read."""
        whole = with_system(messages, self._system)
        if any(isinstance(each.get("content"), list) for each in whole) and self._joins_parts:
            return [{**each, "content": text_of(each)} for each in whole]
        return whole

    @cached_property
    def _joins_parts(self) -> bool:
        """Whether the parts of a content must be one string: the template reads strings, and does
        not read parts in the same way."""
        text = self._shown(OTHER_TEXT)
        parts = self._shown([{"type": "text", "text": OTHER_TEXT}])
        return OTHER_TEXT in text and parts != text

    def _shown(self, content: Any) -> str:
        """A message of the user with this content; "" if the template refuses it."""
        try:
            return self._render([{"role": "user", "content": content}], None)
        except ChatTemplateError:
            return ""

    # -- turns -------------------------------------------------------------------------------

    def _marked_by_template(self, messages: Sequence[Message], tools: Any) -> MarkedText:
        """Use the template's own ``{% generation %}`` blocks."""
        text, blocks = self._rendered(messages, tools, generate=False, marked=True)
        turns = [message for message in messages if message["role"] == ASSISTANT]
        wanted = [is_target(message) for message in turns]
        if len(blocks) == len(turns):
            blocks = [block for block, chosen in zip(blocks, wanted, strict=True) if chosen]
        elif not all(wanted):
            raise ChatTemplateError(
                f"the chat template has {len(blocks)} generation blocks for {len(turns)} turns of "
                "the assistant, so 'weight' cannot be assigned"
            )
        return MarkedText(text, [block for block in blocks if block[0] < block[1]])

    def _turn(
        self, text: str, messages: Sequence[Message], place: int, tools: Any
    ) -> tuple[int, int]:
        """The range of the assistant's turn at a place in the text of all messages."""
        before = self._render(messages[:place], tools, generate=True) if place else ""
        alone = self._render(messages[: place + 1], tools)
        if not (text.startswith(before) and alone.startswith(before)):
            raise self._not_incremental(place, "the text before it changes when it is there")
        if text.startswith(alone):
            return len(before), len(alone)
        return len(before), self._end_in_history(text, messages, place, tools, len(before), alone)

    def _end_in_history(
        self,
        text: str,
        messages: Sequence[Message],
        place: int,
        tools: Any,
        first: int,
        alone: str,
    ) -> int:
        """The end of a turn of which the template leaves out the start once others follow (its
        reasoning): the longest end of the turn alone that is in the text at its place."""
        following = next(
            (at for at in range(place + 1, len(messages)) if messages[at]["role"] == ASSISTANT),
            None,
        )
        whole = text if following is None else self._render(messages[:following], tools, True)
        if not text.startswith(whole):
            raise self._not_incremental(place, "its text changes with later messages")
        kept = _overlap(alone[first:], whole[first:])
        rest = whole[first + kept :]
        other = [*messages[:place], {"role": ASSISTANT, "content": OTHER_TEXT}]
        other_alone = self._render(other, tools)
        after = [*other, *messages[place + 1 : following]]
        other_whole = self._render(after, tools, following is not None)
        turn_end = other_whole[: len(other_whole) - len(rest)]
        end = other_alone[other_alone.rfind(OTHER_TEXT) :]
        if not kept or not other_whole.endswith(rest) or not turn_end.endswith(end):
            raise self._not_incremental(place, "its text changes with later messages")
        return first + kept

    def _trimmed(self, text: str, first: int, last: int) -> int:
        """The end of a turn without the white space after a special token that ends it: the model
        stops at that token."""
        turn = text[first:last]
        bare = turn.rstrip()
        special = {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
        ends = any(bare.endswith(token) for token in special if token)
        return first + len(bare) if ends else last

    def _not_incremental(self, place: int, why: str) -> ChatTemplateError:
        return ChatTemplateError(
            f"no loss mask is right for message {place + 1} with this chat template: {why}; use a "
            "template with {% generation %} blocks (dataset.chat_template: FILE)"
        )

    # -- rendering ---------------------------------------------------------------------------

    def _template(self, tools: Any) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(self._file, tools)
        except ValueError as error:
            message = f"the tokenizer {self._tokenizer.name_or_path} has no chat template"
            message = f"{message}: name a Jinja file in its place (chat_template: FILE)"
            raise ConfigError((Problem("", "chat_template", message),)) from error
        return template

    def _render(self, messages: Sequence[Message], tools: Any, generate: bool = False) -> str:
        return self._rendered(messages, tools, generate=generate, marked=False)[0]

    def _rendered(
        self, messages: Sequence[Message], tools: Any, *, generate: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the ranges of characters of its generation blocks if ``marked``."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._options}
        plain = [
            {key: value for key, value in message.items() if value is not None and key != "weight"}
            for message in messages
        ]
        try:
            rendered: Any = render_jinja_template(
                conversations=[plain],
                tools=tools,
                chat_template=self._template(tools),
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marked,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ChatTemplateError(f"the chat template refuses it: {reason}") from error
        (text,), blocks = rendered
        return text, [(first, last) for first, last in blocks[0]] if marked else []


def _file_of(config: DatasetConfig) -> str | None:
    """The template in a file that the configuration names."""
    if isinstance(config.chat_template, bool):
        return None
    try:
        return inputs.read(Path(config.chat_template)).decode()
    except UnicodeDecodeError as error:
        message = f"{config.chat_template} is not UTF-8 text: {error.reason}"
        raise ConfigError((Problem("", "chat_template", message),)) from error


def _overlap(end: str, start: str) -> int:
    """The length of the longest end of one text with which the other begins."""
    lengths = range(min(len(end), len(start)), 0, -1)
    return next((length for length in lengths if start.startswith(end[-length:])), 0)
