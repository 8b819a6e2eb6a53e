"""What a chat template leaves out of a conversation. Torch-free.

Every value that the model must see gets a mark, and the marks are looked for in the text. So a
value is found in whatever form the template writes it, and is not mistaken for another text that
has the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from slurmrl.data.messages import Message, is_target, text_of

REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message's reasoning."""
MARKS: Final = "mark{}x"
Rendered = Callable[[Sequence[Message], Any], str]
"""Returns the text of messages and tools, or "" if the template refuses them."""


def left_out(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    """Name the first value of a conversation that the template does not write; "" for none."""
    return _missing(messages, tools, rendered) or _reasoning(messages, tools, rendered)


def _missing(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    marks = _Marks()
    marked = [marks.message(place, message) for place, message in enumerate(messages, start=1)]
    text = rendered(marked, tools and [marks.tool(tool) for tool in tools])
    return next((name for mark, name in marks.names.items() if text and mark not in text), "")


def _reasoning(messages: Sequence[Message], tools: Any, rendered: Rendered) -> str:
    """Look for the reasoning of the last trained message that has some. Templates may drop it as
    soon as other messages follow, so none does."""
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
    """Marks values; ``names`` says which value has a mark."""

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
        if arguments := function.get("arguments"):
            mark = self._mark(f"the arguments of the {what}")
            as_text = isinstance(arguments, str)
            changed["arguments"] = f'{{"{mark}": 1}}' if as_text else dict.fromkeys(arguments, mark)
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


def _with(value: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool or a call with other values of its function."""
    changed = {**_function(value), **changes}
    return {**value, "function": changed} if isinstance(value.get("function"), Mapping) else changed
