"""Built-in environments: answer tool calls with results; guess a number."""

from __future__ import annotations

import asyncio
import json
import re
from hashlib import blake2b
from typing import Any, Final, Literal, NamedTuple

from slurmrl.config.schema.data import Template
from slurmrl.errors import UsageError
from slurmrl.rollouts.base import Environment, EpisodeItem, PolicyTurn, Reply
from slurmrl.rollouts.tools.toolbox import ToolResult, Tools

JSON_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BRACKET_CALL: Final = re.compile(r"\[(\w[\w.-]*)\((.*?)\)\]", re.DOTALL)
NUMBER = re.compile(r"-?\d+")


class ToolCall(NamedTuple):
    name: str
    arguments: tuple[str, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012 - never changed
    wrong: str = ""
    """Reason why the call cannot be made."""


class ToolCalls(Environment):
    """Environment that calls the tools which a turn names.

    :param format: how a turn calls a tool. `json`: ``<tool_call>{"name": "calculator",
        "arguments": {"expression": "2*3"}}</tool_call>``, as in Hermes and Qwen; `brackets`:
        ``[calculator(2*3)]``, with one argument, for small models.
    :param role: the role of the message with the results in the chat template.
    :param message: that message, with ``{results}``: one line for each call.
    :param max_calls: the most calls of a turn; if a turn has more, none of them is made.
    """

    def __init__(
        self,
        item: EpisodeItem,
        tools: Tools,
        *,
        format: Literal["json", "brackets"] = "json",
        role: str = "tool",
        message: str = "{results}",
        max_calls: int = 8,
    ) -> None:
        super().__init__(item, tools)
        if format not in ("json", "brackets"):
            raise UsageError(f"format {format!r} is not allowed; allowed: json, brackets")
        if max_calls < 1:
            raise UsageError(f"max_calls {max_calls} is not allowed: it must be at least 1")
        self._message = Template.parse(message)
        if "results" not in self._message.fields or len(self._message.fields) > 1:
            raise UsageError(f"message {message!r} must have the field {{results}} and no other")
        self._parse = json_calls if format == "json" else bracket_calls
        self._role, self._most = role, max_calls

    async def step(self, turn: PolicyTurn) -> Reply:
        calls = self._parse(turn.text)
        if not calls:
            return Reply(done=True)
        if len(calls) > self._most:
            results = [f"error: {len(calls)} calls in a turn; at most {self._most} are allowed"]
        else:
            made = await asyncio.gather(*map(self._call, calls))
            results = [result.text for result in made]
        text = self._message.fill({"results": "\n".join(results)})
        return Reply(text=text, role=self._role)

    async def _call(self, call: ToolCall) -> ToolResult:
        if call.wrong:
            return self.tools.refused(call.wrong)
        return await self.tools.call(call.name, *call.arguments, **call.keywords)


def json_calls(text: str) -> list[ToolCall]:
    return [_json_call(body) for body in JSON_CALL.findall(text)]


def bracket_calls(text: str) -> list[ToolCall]:
    return [ToolCall(name, (argument,)) for name, argument in BRACKET_CALL.findall(text)]


def _json_call(body: str) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", wrong=f"the call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", wrong='a call is {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], wrong="the arguments are not an object")
    return ToolCall(value["name"], keywords=arguments)


class GuessNumber(Environment):
    """The last number of a turn is the guess. The turn that finds the secret earns 1.

    :param low: smallest secret.
    :param high: largest secret.

    The secret is the row's answer; of a row without one it follows from the sample's id, so that
    all completions of a prompt have the same.
    """

    def __init__(self, item: EpisodeItem, tools: Tools, *, low: int = 1, high: int = 100) -> None:
        super().__init__(item, tools)
        if low > high:
            raise UsageError(f"low {low} exceeds high {high}")
        self._low, self._high = low, high
        if item.answer and not NUMBER.fullmatch(item.answer.strip()):
            raise UsageError(f"the answer {item.answer!r} is not an integer to guess")
        number = int.from_bytes(blake2b(item.sample_id.encode(), digest_size=8).digest(), "big")
        self._secret = int(item.answer) if item.answer else low + number % (high - low + 1)

    async def step(self, turn: PolicyTurn) -> Reply:
        guesses = NUMBER.findall(turn.text)
        if not guesses:
            return Reply(text=f"Say a number from {self._low} to {self._high}.")
        if len(guesses[-1]) > 20:
            return Reply(text="lower")
        guess = int(guesses[-1])
        if guess == self._secret:
            return Reply(reward=1.0, done=True)
        return Reply(text="higher" if guess < self._secret else "lower")
