"""Checks of strings and of conversations: lists of messages with a role and a content. Torch-free.

`left_out` finds the parts of a conversation that a chat template omits. The function puts a mark
into every value that the model must see, and searches for the marks in the rendered text. A mark is
found even if the template changes the form of the value, and no other text contains it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

Message = Mapping[str, Any]
ASSISTANT: Final = "assistant"
MEDIA: Final = ("image", "video")
"""Types of message parts for which the chat template writes a placeholder."""


def wrong_messages(value: Any) -> str:
    """Return why a value is not a conversation; "" for a conversation."""
    if not isinstance(value, list) or not value:
        return f"must be a list of messages, but is {kind_of(value)}"
    for place, message in enumerate(value, start=1):
        if reason := _wrong_message(message):
            return f"message {place} {reason}"
    return ""


def wrong_prompt(value: Any) -> str:
    """Return why a conversation is not a prompt."""
    if reason := wrong_messages(value):
        return reason
    if value[-1]["role"] == ASSISTANT:
        return (
            "ends with a message of the assistant: a prompt ends before the assistant's turn; "
            "remove that message from the rows, or remove it in a type of your own (docs/data.md)"
        )
    return ""


def wrong_conversation(value: Any) -> str:
    """Return the reason why a model cannot learn from a conversation; "" if it can."""
    if reason := wrong_messages(value) or _wrong_switch(value):
        return reason
    if not any(is_target(message) for message in value):
        return "has no message of the assistant to learn from"
    return ""


def wrong_answer(value: Any) -> str:
    """Return why messages are neither an answer nor a conversation that ends with an answer."""
    if reason := wrong_messages(value) or _wrong_switch(value):
        return reason
    if value[-1]["role"] != ASSISTANT:
        return f"must end with a message of the assistant, but ends with '{value[-1]['role']}'"
    if not is_target(value[-1]):
        return "ends with a message with 'weight' 0, so no answer can be learned; remove 'weight'"
    return ""


def is_messages(value: Any) -> bool:
    """Return whether a value has the form of messages, even if they are invalid."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def begins_with_prompt(value: Any) -> bool:
    """Return whether an answer is a conversation that does not begin with the assistant."""
    return is_messages(value) and value[0].get("role") != ASSISTANT


def common_prompt(one: Sequence[Message], other: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with which both conversations begin."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [message for message, _ in alike]


def as_context(messages: Sequence[Message]) -> list[Message]:
    """Return a prompt's messages without targets: messages of the assistant get ``"weight": 0``."""
    return [
        {**message, "weight": 0} if message["role"] == ASSISTANT else message
        for message in messages
    ]


def wrong_tools(value: Any) -> str:
    tools = value is None or (
        isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    )
    return "" if tools else f"must be a list of JSON schemas, but is {kind_of(value)}"


def is_target(message: Message) -> bool:
    """Return whether a message is from the assistant and is not excluded by ``"weight": 0``."""
    return message["role"] == ASSISTANT and message.get("weight") != 0


def text_of(message: Message) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """Return the messages; put a system message first unless there is one already."""
    if system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


SWITCHES: Final = ("train", "training", "trainable")
"""Keys with which other trainers exclude a message from training."""


def _wrong_switch(messages: Sequence[Message]) -> str:
    """Return the problem of a target that other training libraries would exclude, or ""."""
    for place, message in enumerate(messages, start=1):
        switch = next((key for key in SWITCHES if message.get(key) == 0), None)
        if switch is not None and is_target(message):
            value = json.dumps(message[switch])
            return f"message {place} has '{switch}' {value}: write \"weight\": 0 to exclude it"
    return ""


def _wrong_message(message: Any) -> str:
    if not isinstance(message, dict):
        return f"must be an object with 'role' and 'content', but is {kind_of(message)}"
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        return f"must have a 'role' (system, user, assistant, tool), but it is {kind_of(role)}"
    if message.get("weight") not in (None, 0, 1):
        return f"has 'weight' {kind_of(message['weight'])}: allowed are 0 and 1"
    content = message.get("content")
    if content is None:
        return "" if message.get("tool_calls") else "has neither 'content' nor 'tool_calls'"
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        if isinstance(part, dict) and part.get("type") in MEDIA:
            continue  # `data.row_images` checks images and videos
        if not isinstance(part, dict) or part.get("type") != "text":
            return f"has a part that is not text: {kind_of(part)}"
        if reason := wrong_text(part.get("text")):
            return f"has a 'content' that {reason}"
    return ""


SHOWN = 60
"""Maximum number of characters of an invalid value in messages."""


def wrong_text(value: Any) -> str:
    """Return the reason why a value is not a string; "" for a string.

    Other values are never converted to strings, because prompts would then contain Python syntax
    such as ``None`` or ``[{'role': …``.
    """
    if not isinstance(value, str):
        return f"must be a string, but is {kind_of(value)}{_advice(value)}"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        return f"is not valid text: {half} at character {error.start + 1} is a lone surrogate"
    return ""


def kind_of(value: Any) -> str:
    """Describe a value for messages, for example ``a number (42)``."""
    if value is None:
        return "null"
    if _is_messages(value):
        return "a list of messages"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    text = json.dumps(value)
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"{kinds.get(type(value), 'an object')} ({shown})"


def _advice(value: Any) -> str:
    if _is_messages(value):
        return (
            ": set dataset.chat_template to true (it is false, or left out and the first row is "
            "text), or write the rendered text into the line"
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f': write "{json.dumps(value)}"'
    return ""


def _is_messages(value: Any) -> bool:
    return is_messages(value) and all("role" in message for message in value)


REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message's reasoning."""
MARKS: Final = "mark{}x"
Rendered = Callable[[Sequence[Message], Any], str]
"""Renders messages and tools; returns "" if the template rejects them."""


def left_out(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    """Return the name of the first value that the template does not write; "" for none."""
    return _missing(messages, tools, rendered) or _reasoning(messages, tools, rendered)


def _missing(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    marks = _Marks()
    marked = [marks.message(place, message) for place, message in enumerate(messages, start=1)]
    text = rendered(marked, tools and [marks.tool(tool) for tool in tools])
    return next((name for mark, name in marks.names.items() if text and mark not in text), "")


def _reasoning(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    """Return the name of the last target's reasoning if the template omits it; else "".

    The messages after this target are left out, because templates may omit earlier reasoning.
    """
    places = [
        place
        for place, message in enumerate(messages)
        if is_target(message) and any(message.get(key) for key in REASONING)
    ]
    if not places:
        return ""
    mark = MARKS.format(0)
    keys = [key for key in REASONING if messages[places[-1]].get(key)]
    last = {**messages[places[-1]], **dict.fromkeys(keys, mark)}
    text = rendered([*messages[: places[-1]], last], tools)
    return f"the {keys[0]} of message {places[-1] + 1}" if text and mark not in text else ""


class _Marks:
    """Replaces values of messages by marks; ``names`` maps each mark to its value's name."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def message(self, place: int, message: Message) -> Message:
        marked = dict(message)
        where = f"of message {place}"
        if (text := text_of(message)).strip():
            mark = self._mark(f"the content {where}")
            if isinstance(message["content"], str):
                marked["content"] = text + mark
            else:
                marked["content"] = [*message["content"], {"type": "text", "text": mark}]
        if isinstance(message.get("name"), str) and message["role"] != "tool":
            marked["name"] = self._mark(f"the name {where}")
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            marked["tool_calls"] = [self._call(call, where) for call in calls]
        if isinstance(call := message.get("function_call"), Mapping):  # older form of tool calls
            marked["function_call"] = self._call(call, where)
        return marked

    def tool(self, tool: Any) -> Any:
        name = _function(tool).get("name")
        if not isinstance(name, str):
            return tool
        return _with(tool, {"name": self._mark(f"the tool '{name}'")})

    def _call(self, call: Any, where: str) -> Any:
        function = _function(call)
        what = f"tool call '{function.get('name')}' {where}"
        changed: dict[str, Any] = {"name": self._mark(f"the {what}")}
        given = function.get("arguments")
        arguments = _object(given) if given and isinstance(given, str) else given
        if arguments and isinstance(arguments, Mapping):
            marked = {key: self._mark(f"the argument '{key}' of the {what}") for key in arguments}
            changed["arguments"] = json.dumps(marked) if isinstance(given, str) else marked
        return _with(call, changed)

    def _mark(self, name: str) -> str:
        mark = MARKS.format(len(self.names) + 1)
        self.names[mark] = name
        return mark


def _function(value: Any) -> Mapping[str, Any]:
    """Return the object with the name of a tool or of a call."""
    inner = value.get("function") if isinstance(value, Mapping) else None
    found = inner if isinstance(inner, Mapping) else value
    return found if isinstance(found, Mapping) else {}


def _object(text: str) -> Any:
    """Parse a JSON value. For invalid JSON, return an object whose only key is the string."""
    try:
        return json.loads(text)
    except ValueError:
        return {text: None}


def _with(value: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool or a call with ``changes`` to the fields of its function."""
    changed = {**_function(value), **changes}
    return {**value, "function": changed} if isinstance(value.get("function"), Mapping) else changed
