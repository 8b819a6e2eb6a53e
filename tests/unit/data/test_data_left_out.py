"""Tests that content omitted by a chat template is a problem of the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pytest

from slurmrl.data.conversations import Message, left_out

CONTENT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
WHOLE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }} {{ m.name }}> {{ m.reasoning_content }}"
    "{{ m.content | trim }}{% for c in m.tool_calls %}{{ (c.function or c) | tojson }}{% endfor %}"
    "\n{% endfor %}"
)
FIRST_SYSTEM = (
    "{{ messages[0].content }}{% for m in messages %}{% if m.role != 'system' %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)
CALL_ONLY = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LAST_THOUGHT = (
    "{% for m in messages %}{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
ONLY_A = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}{% endfor %}"
)
TWO = '{"a": 1, "b": 2}'
USER = {"role": "user", "content": "add 1 and 2\n"}
SAID = {"role": "assistant", "content": "3"}
THOUGHT = {**SAID, "reasoning_content": "easy"}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
AS_TEXT = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": '{"a": "1 and 2"}'}]}
OLD_CALL = {"role": "assistant", "content": "", "function_call": CALL["function"]}
GIVEN = (TWO, "{}", "not JSON", "[1]", {}, [1, 2])
TOOL = {"type": "function", "function": {"name": "add"}}
NAMED = {**USER, "name": "add"}
SYSTEM = {"role": "system", "content": "add"}


def missing(template: str, messages: Sequence[Message], tools: Any = None) -> str:
    compiled = jinja2.Environment().from_string(template)

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        return compiled.render(messages=messages, tools=tools)

    return left_out(messages, tools, rendered)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "name"),
    [
        (CONTENT, [USER, CALLS], None, "the tool call 'add' of message 2"),
        (CONTENT, [USER, AS_TEXT], None, "the tool call 'add' of message 2"),
        (CONTENT, [USER, OLD_CALL], None, "the tool call 'add' of message 2"),
        (
            CONTENT.replace("\n", "{{ m.tool_calls[0].function | tojson if m.tool_calls }}"),
            [USER, {**CALLS, "tool_calls": [CALL, CALL]}],
            None,
            "the tool call 'add' of message 2",
        ),
        (CONTENT, [USER, SAID], [TOOL], "the tool 'add'"),
        (CONTENT, [USER, SAID], [{"name": "add"}], "the tool 'add'"),
        (CONTENT, [NAMED, SAID], None, "the name of message 1"),
        (CONTENT, [USER, THOUGHT], None, "the reasoning_content of message 2"),
        (CONTENT, [USER, THOUGHT, USER], None, "the reasoning_content of message 2"),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER, SAID], None, "the content of message 2"),
        (CALL_ONLY, [USER, {**CALLS, "content": "add"}], None, "the content of message 2"),
        (
            WHOLE.replace("(c.function or c)", "(c.function or c).name"),
            [USER, CALLS],
            None,
            "the argument 'a' of the tool call 'add' of message 2",
        ),
        (ONLY_A, [USER, CALLS], None, "the argument 'b' of the tool call 'add' of message 2"),
        (
            ONLY_A.replace(".arguments.a", ".arguments.split(',')[0]"),
            [USER, {**CALLS, "tool_calls": [{"function": {"name": "add", "arguments": TWO}}]}],
            None,
            "the argument 'b' of the tool call 'add' of message 2",
        ),
        ("{{ messages[-1].content }}", [SAID, USER], None, "the content of message 1"),
    ],
)
def test_dropped_value_is_named_even_if_its_words_occur_elsewhere(
    template: str, messages: Sequence[Message], tools: Any, name: str
) -> None:
    assert missing(template, messages, tools) == name


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (WHOLE, [SYSTEM, NAMED, CALLS, {"role": "tool", "content": "3"}, THOUGHT], [TOOL]),
        (WHOLE, [USER, AS_TEXT], [{"name": "add"}]),
        (
            WHOLE,
            [
                USER,
                *(
                    {**CALLS, "tool_calls": [{"name": "add", "arguments": given}]}
                    for given in GIVEN
                ),
            ],
            None,
        ),
        (
            CONTENT.replace("\n", "{{ m.tool_calls[0].name if m.tool_calls }}"),
            [USER, {**CALLS, "tool_calls": [{"name": "add", "arguments": ""}]}],
            None,
        ),
        (CONTENT.replace("\n", "{{ m.function_call }}"), [USER, OLD_CALL], None),
        (WHOLE, [{"role": "user", "content": '"quoted"\n\ttext '}], None),
        (CONTENT, [USER, {"role": "tool", "name": "add", "content": "3"}, SAID], None),
        (LAST_THOUGHT, [USER, THOUGHT, USER, SAID], None),
        (CONTENT, [USER, {**THOUGHT, "weight": 0}, USER], None),
        (CONTENT, [USER, {"role": "assistant", "content": ""}], []),
    ],
)
def test_value_written_in_any_form_is_not_reported_as_dropped(
    template: str, messages: Sequence[Message], tools: Any
) -> None:
    assert missing(template, messages, tools) == ""
