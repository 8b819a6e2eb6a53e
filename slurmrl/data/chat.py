"""Render conversations with chat templates; find the assistant's text and the ends of turns.

Only transformers may import torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slurmrl.config.schema import Config
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.conversations import (
    ASSISTANT,
    MEDIA,
    Message,
    as_context,
    is_target,
    left_out,
    text_of,
    with_system,
)
from slurmrl.data.tokenizer import end_id, without_ends
from slurmrl.errors import ChatTemplateError, ConfigError, Problem
from slurmrl.fsio import inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARKED_BLOCK: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Pattern of a tag that begins a block of the assistant's text in a template."""
ASKED: Final[Message] = {"role": "user", "content": "Hello."}
OTHER_TEXT: Final = "Something else."
TURN_TEXT: Final = "The turn before."
SAID: Final[Message] = {"role": ASSISTANT, "content": TURN_TEXT}


class MarkedText(NamedTuple):
    text: str
    targets: Sequence[tuple[int, int]]
    """The parts that the assistant writes, as ranges of characters, in order."""


class ChatTemplate:
    """The chat template of a dataset: from the tokenizer or from a file.

    Methods raise ChatTemplateError if the template rejects a conversation, or if its output does
    not separate the turns.
    """

    def __init__(self, config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._options = config.chat_template_options
        self._system = config.system_prompt
        self._tools = list(config.tools or ()) or None
        self._file = template_file(config)
        if not tokenizer.is_fast and config.kind != "prompt":
            message = f"the tokenizer {tokenizer.name_or_path} has no tokenizer.json, without which"
            message = f"{message} the assistant's tokens cannot be found in a conversation"
            raise ConfigError((Problem("", "chat_template", message),))

    def prompt(self, messages: Sequence[Message], tools: Any) -> str:
        """Render a prompt and the generation prompt, which begins the assistant's turn."""
        messages = self._whole(messages)
        text = self._render(messages, tools, generate=True)
        self._require_all(as_context(messages), tools)
        return text

    def conversation(self, messages: Sequence[Message], tools: Any) -> MarkedText:
        """Render a conversation. The targets are the turns of the assistant.

        A target begins after the generation prompt. The target includes everything that the
        template puts after the turn, except white space after a special token.
        """
        messages = self._whole(messages)
        text = whole = self._render(messages, tools)
        self._require_all(messages, tools)
        if MARKED_BLOCK.search(self._template(tools)):
            return self._marked_by_template(messages, tools)
        targets = []
        for place, message in enumerate(messages):
            if is_target(message):
                first, last = self._turn(text, messages, place, tools)
                if self.turn_end.by_next:
                    calls = bool(message.get("tool_calls"))
                    last, added = self.turn_end.in_text(text, last, calls=calls)
                    whole, last = whole + added, last + len(added)
                targets.append((first, last))
        return MarkedText(whole, targets)

    def writes(self, tools: Sequence[Any]) -> bool:
        """Return whether the template writes the names of all these tools into a prompt."""
        asked = self._whole([ASKED])
        return bool(self._try(asked, tools)) and not left_out(asked, tools, self._try)

    def uses(self, name: str) -> bool:
        """Return whether the template has a variable or a function of this name."""
        return name in self._template(self._tools)

    @cached_property
    def turn_end(self) -> EndOfTurn:
        """The tokens with which the template ends a turn of the assistant."""
        with suppress(ChatTemplateError):
            alone = self._render(with_system([ASKED, SAID], self._system), self._tools)
            following = [self.around_messages(["user"])[0]]
            with suppress(ChatTemplateError):  # the template may reject tools
                following.append(self.around_messages(["tool"])[0])
            return EndOfTurn.of(alone.rpartition(TURN_TEXT)[2], following, self._known)
        return EndOfTurn()

    @property
    def trains_end(self) -> bool:
        """Whether training on a turn includes its end; generation blocks may leave the end out."""
        with suppress(ChatTemplateError):
            text, targets = self.conversation([ASKED, SAID], self._tools)
            return any(text[:last].rstrip().endswith(self.turn_end.tokens) for _, last in targets)
        return bool(self.turn_end.tokens)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end a turn, including tokens that end only turns with tool calls."""
        tail = self._try([ASKED, SAID], self._tools).rpartition(TURN_TEXT)[2].strip()
        for arguments in ({"text": TURN_TEXT}, f'{{"text": "{TURN_TEXT}"}}'):
            call = {"type": "function", "function": {"name": "do", "arguments": arguments}}
            calls: Message = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
            end = self._try([ASKED, calls], self._tools).rpartition(TURN_TEXT)[2].strip()
            own = max(filter(end.endswith, self._known), key=len, default="")
            if own and tail and not self.turn_end.by_next and not end.endswith(tail):
                return tuple(dict.fromkeys((*self.turn_end.tokens, own)))
        return self.turn_end.tokens

    @cached_property
    def _known(self) -> set[str]:
        """The strings of the tokenizer's special and added tokens."""
        return {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}

    def around_messages(self, roles: Sequence[str]) -> list[str]:
        """Return the strings that the template puts around messages of these ``roles``.

        The first string is between a turn of the assistant and the first message. The last string
        is between the last message and the assistant's next turn. The strings in between are put
        between consecutive messages.
        """
        texts = [f"{OTHER_TEXT} {number}." for number in range(len(roles))]
        messages: list[Message] = [
            ASKED,
            SAID,
            *({"role": role, "content": text} for role, text in zip(roles, texts, strict=True)),
        ]
        rest = self._render(with_system(messages, self._system), self._tools, generate=True)
        pieces = []
        for text in (TURN_TEXT, *texts):
            piece, found, rest = rest.partition(text)
            if not found:
                raise ChatTemplateError(
                    f"the chat template leaves out a turn of the assistant or a message after it "
                    f"(roles: {', '.join(roles)}); use another role"
                )
            pieces.append(piece)
        return [*pieces[1:], rest]

    def _require_all(self, messages: Sequence[Message], tools: Any) -> None:
        """Raise ChatTemplateError if the model would not see a part of the conversation."""
        if missing := left_out(messages, tools, self._try):
            raise ChatTemplateError(
                f"the chat template leaves out {missing}: use a template that writes it "
                "(dataset.chat_template: FILE), or remove it from the row or from dataset.tools"
            )

    def _try(self, messages: Sequence[Message], tools: Any) -> str:
        """Render messages; return "" if the template rejects them."""
        with suppress(ChatTemplateError):
            return self._render(messages, tools)
        return ""

    def _whole(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the system prompt, in a form that the template can read."""
        whole = [self._open(each) for each in with_system(messages, self._system)]
        contents = [each["content"] for each in whole if isinstance(each.get("content"), list)]
        has_media = any(part.get("type") in MEDIA for parts in contents for part in parts)
        if contents and not has_media and self._joins_parts:
            return [{**each, "content": text_of(each)} for each in whole]
        return whole

    def _open(self, message: Message) -> Message:
        """Remove end-of-turn tokens from a message of the assistant: the template adds a token."""
        content = message.get("content")
        if message["role"] != ASSISTANT or not isinstance(content, str):
            return message
        own = () if self.turn_end.by_next else self.turn_end.tokens
        return {**message, "content": without_ends(content, [str(self._tokenizer.eos_token), *own])}

    @cached_property
    def _joins_parts(self) -> bool:
        """Whether the template renders a string, but rejects the same text as a list of parts."""
        text = self._shown(OTHER_TEXT)
        parts = self._shown([{"type": "text", "text": OTHER_TEXT}])
        return OTHER_TEXT in text and parts != text

    def _shown(self, content: Any) -> str:
        """Render a user message with this content; return "" if the template rejects it."""
        return self._try([{"role": "user", "content": content}], None)

    # -- turns -------------------------------------------------------------------------------

    def _marked_by_template(self, messages: Sequence[Message], tools: Any) -> MarkedText:
        """Render a conversation with the template's ``{% generation %}`` blocks as targets."""
        text, blocks = self._rendered(messages, tools, generate=False, marked=True)
        turns = [message for message in messages if message["role"] == ASSISTANT]
        wanted = [is_target(message) for message in turns]
        if len(blocks) == len(turns):
            blocks = [block for block, chosen in zip(blocks, wanted, strict=True) if chosen]
        elif not all(wanted):
            raise ChatTemplateError(
                f"the chat template has {len(blocks)} generation blocks for {len(turns)} turns of "
                "the assistant, so the values of 'weight' cannot be assigned to blocks"
            )
        return MarkedText(text, [block for block in blocks if block[0] < block[1]])

    def _turn(
        self, text: str, messages: Sequence[Message], place: int, tools: Any
    ) -> tuple[int, int]:
        """Return the range of the assistant's turn at a place in the rendered messages."""
        if place:
            before = self._render(messages[:place], tools, generate=True)
        else:
            before = text[: self._opening(text, tools)]
        alone = self._render(messages[: place + 1], tools)
        if not (text.startswith(before) and alone.startswith(before)):
            raise self._not_incremental(place, "it changes the text before the message")
        last = self._trimmed(alone, len(before), len(alone))
        if not text.startswith(alone[:last]):
            last = self._end_in_history(text, messages, place, tools, len(before), alone)
            last = self._trimmed(text, len(before), last)
        return len(before), last

    def _opening(self, text: str, tools: Any) -> int:
        """Return the start of the assistant's turn at the beginning of a rendered conversation.

        The turn starts after the generation prompt. Example messages show this prompt, because
        templates need not render an empty conversation.
        """
        asked = self._render([ASKED], tools, generate=True)
        answered = self._render([ASKED, SAID], tools).partition(TURN_TEXT)[0]
        begun, found, _ = self._render([SAID], tools).partition(TURN_TEXT)
        if not found or not answered.startswith(asked):
            raise self._not_incremental(0, "its text does not begin with the generation prompt")
        alike = [one == other for one, other in zip(begun, text, strict=False)]
        begun = begun[: [*alike, False].index(False)]
        header = next(asked[at:] for at in range(len(asked) + 1) if asked[at:] in begun)
        if header:
            return begun.rfind(header) + len(header)
        return len(begun.removesuffix(answered[len(asked) :]))

    def _end_in_history(
        self, text: str, messages: Sequence[Message], place: int, tools: Any, first: int, alone: str
    ) -> int:
        """Return the end of a turn whose start the template omits if other messages follow.

        The omitted start is the turn's reasoning. ``alone`` is the conversation up to this turn.
        The result is the end of the turn's longest suffix that is in ``text`` at ``first``.
        """
        following = next(
            (at for at in range(place + 1, len(messages)) if messages[at]["role"] == ASSISTANT),
            None,
        )
        whole = text if following is None else self._render(messages[:following], tools, True)
        if not text.startswith(whole):
            raise self._not_incremental(place, "later messages change its text")
        kept = _overlap(alone[first:], whole[first:])
        rest = whole[first + kept :]
        other = [*messages[:place], {"role": ASSISTANT, "content": OTHER_TEXT}]
        other_alone = self._render(other, tools)
        after = [*other, *messages[place + 1 : following]]
        other_whole = self._render(after, tools, following is not None)
        turn_end = other_whole[: len(other_whole) - len(rest)]
        end = other_alone[other_alone.rfind(OTHER_TEXT) :]
        if not kept or not other_whole.endswith(rest) or not turn_end.endswith(end):
            raise self._not_incremental(place, "later messages change its text")
        return first + kept

    def _trimmed(self, text: str, first: int, last: int) -> int:
        """Return the end of the token that ends a turn; without this token, return ``last``."""
        turn = text[first:last]
        if not self.turn_end.by_next and self.turn_end.tokens:
            (token,) = self.turn_end.tokens
            place = turn.rfind(token)
            if place >= 0:
                return first + place + len(token)
        bare = turn.rstrip()
        ends = any(bare.endswith(token) for token in self._known if token)
        return first + len(bare) if ends else last

    def _not_incremental(self, place: int, why: str) -> ChatTemplateError:
        return ChatTemplateError(
            f"no correct loss mask for message {place + 1} with this chat template: {why}; use a "
            "template with {% generation %} blocks (dataset.chat_template: FILE)"
        )

    # -- rendering ---------------------------------------------------------------------------

    def _template(self, tools: Any) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(self._file, tools)
        except ValueError as error:
            message = f"the tokenizer {self._tokenizer.name_or_path} has no chat template, which"
            message = f"{message} messages need: set dataset.chat_template to a Jinja file"
            raise ConfigError((Problem("", "chat_template", message),)) from error
        return template

    def _render(self, messages: Sequence[Message], tools: Any, generate: bool = False) -> str:
        return self._rendered(messages, tools, generate=generate, marked=False)[0]

    def _rendered(
        self, messages: Sequence[Message], tools: Any, *, generate: bool, marked: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered string and, if ``marked``, the ranges of its generation blocks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._tokenizer.special_tokens_map, **self._options}
        try:
            rendered: Any = render_jinja_template(
                conversations=[[*map(_plain, messages)]],
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
            raise ChatTemplateError(
                f"the chat template rejects the conversation: {reason}"
            ) from error
        (text,), blocks = rendered
        return text, [(first, last) for first, last in blocks[0]] if marked else []


def stop_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end the actor's completions.

    The result has the end-of-text token and the tokens that end a turn in the datasets' chat
    templates. Raises ConfigError, UnreadableInputError.
    """
    parts = [part for each in config.datasets().values() for part in each.parts.values()]
    templates = [ChatTemplate(part, tokenizer) for part in parts if part.is_chat]
    tokens = [token for template in templates for token in template.stops]
    known = tokenizer.get_vocab()
    return list(dict.fromkeys([end_id(tokenizer), *(known[token] for token in tokens)]))


def template_file(config: DatasetConfig) -> str | None:
    """Return the template in the file that the configuration names; None without a file.

    Raises ConfigError, UnreadableInputError.
    """
    if not isinstance(config.chat_template, str):
        return None
    try:
        return inputs.read(Path(config.chat_template)).decode()
    except UnicodeDecodeError as error:
        message = f"{config.chat_template} is not UTF-8 text: {error.reason}"
        raise ConfigError((Problem("", "chat_template", message),)) from error


def _plain(message: Message) -> dict[str, Any]:
    """Return a message without 'weight' and nulls: templates take a null ``image`` for an image."""
    content = message.get("content")
    if isinstance(content, list):
        content = [
            {key: each for key, each in part.items() if each is not None} for part in content
        ]
    plain = {**message, "content": content, "weight": None}
    return {key: value for key, value in plain.items() if value is not None}


def _overlap(end: str, start: str) -> int:
    """Return the length of the longest suffix of ``end`` that is a prefix of ``start``."""
    lengths = range(min(len(end), len(start)), 0, -1)
    return next((length for length in lengths if start.startswith(end[-length:])), 0)


class EndOfTurn(NamedTuple):
    """The tokens of the tokenizer that end a turn.

    Generation stops at each of these tokens. Training on a turn of the assistant includes such a
    token, and a reward model scores a turn at this token.
    """

    tokens: tuple[str, ...] = ()
    """The strings of the tokens; empty if the template ends a turn without a token. The first
    string is the token that comes before a message of the user."""
    by_next: bool = False
    """Whether the token is the beginning of the next message, as in GLM-4's template."""

    @staticmethod
    def of(tail: str, following: Sequence[str], known: Collection[str]) -> EndOfTurn:
        """Return the end of a turn.

        ``tail`` is the string after the content of the last turn. Each of ``following`` is the
        string between the content of a turn and the next message. ``known`` contains the strings of
        the tokenizer's special and added tokens.
        """
        if own := _first(tail, known):
            return EndOfTurn((own.token,))
        nexts = [_first(text, known) for text in following]
        if nexts[0] is None or not nexts[0].leads:
            return EndOfTurn()
        return EndOfTurn(
            tuple(dict.fromkeys(each.token for each in nexts if each and each.leads)), True
        )

    def in_text(self, text: str, place: int, *, calls: bool) -> tuple[int, str]:
        """Return the end of a turn whose end token is the first token of the next message.

        If no message follows, also return that token, which the caller appends; otherwise "". The
        turn's content ends at ``place``. ``calls`` says whether the turn calls tools.
        """
        rest = text[place:]
        bare = rest.lstrip()
        if not bare:
            return len(text), self.tokens[-1 if calls else 0]
        token = max(filter(bare.startswith, self.tokens), key=len, default="")
        return (place + len(rest) - len(bare) + len(token) if token else place), ""


class _FirstToken(NamedTuple):
    token: str
    leads: bool
    """Whether only white space precedes the token."""


def _first(text: str, known: Collection[str]) -> _FirstToken | None:
    """Return the first known token in a string; if several begin there, the longest."""
    found = [(text.find(token), -len(token), token) for token in known if token and token in text]
    if not found:
        return None
    place, _, token = min(found)
    return _FirstToken(token, not text[:place].strip())
