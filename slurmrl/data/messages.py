"""Checks of conversations: lists of messages with a role and a content. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from slurmrl.data.text import kind_of, wrong_text

Message = Mapping[str, Any]
ASSISTANT: Final = "assistant"


def wrong_messages(value: Any) -> str:
    """Why a value is not a conversation; "" if it is."""
    if not isinstance(value, list) or not value:
        return f"must be a list of messages, but is {kind_of(value)}"
    for place, message in enumerate(value, start=1):
        if reason := _wrong_message(message):
            return f"message {place} {reason}"
    return ""


def wrong_prompt(value: Any) -> str:
    """Why a conversation is not a prompt."""
    if reason := wrong_messages(value):
        return reason
    if value[-1]["role"] == ASSISTANT:
        return (
            "ends with a message of the assistant: a prompt ends before the assistant's turn; "
            "remove that message from the rows (docs/data.md, a type of your own)"
        )
    return ""


def wrong_conversation(value: Any) -> str:
    """Why nothing in a conversation can be learnt."""
    if reason := wrong_messages(value):
        return reason
    if not any(is_target(message) for message in value):
        return "has no message of the assistant to learn from"
    return ""


def wrong_answer(value: Any) -> str:
    """Why a list of messages is not an answer, nor a whole conversation with one at its end."""
    if reason := wrong_messages(value):
        return reason
    if value[-1]["role"] != ASSISTANT:
        return f"must end with a message of the assistant, but ends with '{value[-1]['role']}'"
    if not is_target(value[-1]):
        return "ends with a message of 'weight' 0: nothing would be compared or learned"
    return ""


def is_messages(value: Any) -> bool:
    """Whether a value has the form of messages, right or wrong."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def begins_with_prompt(value: Any) -> bool:
    """Whether an answer is a whole conversation: messages that do not begin with the assistant."""
    return is_messages(value) and value[0].get("role") != ASSISTANT


def common_prompt(one: Sequence[Message], other: Sequence[Message]) -> Sequence[Message]:
    """The messages with which two conversations begin alike."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [message for message, _ in alike]


def as_context(messages: Sequence[Message]) -> list[Message]:
    """The messages of a prompt: nothing in them is a target."""
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
    """Whether a message is the assistant's, and not excluded by ``"weight": 0``."""
    return message["role"] == ASSISTANT and message.get("weight") != 0


def text_of(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The messages, after a system message unless they begin with one."""
    if system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


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
        if not isinstance(part, dict) or part.get("type") != "text":
            return f"has a part that is not text: {kind_of(part)}"
        if reason := wrong_text(part.get("text")):
            return f"has a 'content' that {reason}"
    return ""
