"""Environments: tool calls, a number to guess, and the package ``verifiers`` 0.1. Torch-free.

An environment of ``verifiers`` sends requests to an OpenAI client in this process. Here, the
client's model is the policy (`PolicyClient`). New messages are added after the tokens that the
policy has sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from slurmrl.config.schema.data import Template
from slurmrl.data.conversations import text_of
from slurmrl.errors import MissingDependencyError, RunFailedError, UsageError
from slurmrl.registry import resolve
from slurmrl.rollouts.base import Environment, EpisodeItem, PolicyTurn, Reply
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.tools import ToolResult, Tools

if TYPE_CHECKING:
    from slurmrl.rollouts.policy import Policy

JSON_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BRACKET_CALL: Final = re.compile(r"\[(\w[\w.-]*)\((.*?)\)\]", re.DOTALL)
NUMBER = re.compile(r"-?\d+")


class ToolCall(NamedTuple):
    name: str
    arguments: tuple[str, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012 - never changed
    wrong: str = ""
    """Reason why the call cannot be executed."""


class ToolCalls(Environment):
    """Environment that executes the tool calls in a turn.

    :param format: form of a tool call in a turn. `json`: ``<tool_call>{"name": "calculator",
        "arguments": {"expression": "2*3"}}</tool_call>``, as in Hermes and Qwen; `brackets`:
        ``[calculator(2*3)]``, with one argument, for small models.
    :param role: role of the message with the results in the chat template.
    :param message: template of the message with the results. ``{results}`` is replaced by a line
        for each call.
    :param max_calls: maximum number of calls in a turn. If a turn has more, none is executed.
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
            return self.tools.rejected(call.wrong)
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
    """Game in which the last number of a turn is the guess; a correct guess earns 1.

    :param low: smallest secret.
    :param high: largest secret.

    The secret is the row's answer. For a row without an answer, the sample's id determines the
    secret, so that all completions of a prompt have the same secret.
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


HINT: Final = "pip install 'verifiers>=0.1.9,<0.2'"


class VerifiersEpisode:
    """Episode that runs an environment of the verifiers package.

    :param environment: id of the environment: name of the installed module with
        ``load_environment``.
    :param args: arguments of ``load_environment``.

    The rows of the dataset must have the environment's fields: ``prompt`` (messages), ``answer``,
    ``info``, ``task``. The last turn gets the rubric's reward.
    """

    def __init__(self, *, environment: str, args: Mapping[str, Any] | None = None) -> None:
        try:
            import verifiers
        except ImportError as error:
            raise MissingDependencyError(
                f"episode 'verifiers' needs the package: {HINT}"
            ) from error
        if not hasattr(verifiers, "load_environment"):
            found = getattr(verifiers, "__version__", "this version")
            raise UsageError(
                f"verifiers {found} is not supported: it runs environments in separate "
                f"processes with an HTTP server; use 0.1: {HINT}"
            )
        try:
            self._environment: Any = verifiers.load_environment(environment, **(args or {}))
        except (ImportError, AttributeError, ValueError, TypeError, RuntimeError) as error:
            raise UsageError(f"verifiers environment '{environment}': {error}") from error
        if getattr(self._environment, "message_type", "chat") != "chat":
            raise UsageError(f"verifiers environment '{environment}' does not use messages")

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completion:
        client = PolicyClient(policy, item)
        row = item.row
        prompt = row.get("prompt")
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": item.text}]
        given = {
            "prompt": prompt,
            "answer": item.answer,
            "info": row.get("info") or {},
            "task": row.get("task") or "default",
            "example_id": row.get("example_id", item.sample_id),
        }
        state = await self._environment.rollout(given, client, "policy", {})
        if client.failure is not None:
            raise client.failure
        if state.get("error") is not None and not policy.limited:
            raise state["error"]
        await self._environment.rubric.score_rollout(state, contextlib.nullcontext())
        client.completions.reward(float(state["reward"] or 0.0))
        return client.completions


class PolicyClient:
    """Replacement of ``AsyncOpenAI``, with only ``chat.completions.create``."""

    def __init__(self, policy: Policy, item: EpisodeItem) -> None:
        self._policy = policy
        self.completions = Completion(item.prompt)
        self.failure: RunFailedError | None = None
        """Error of the engine, which the environment would mistake for a failure of the model."""
        self._known: list[tuple[str, str]] = []
        """Role and content of the messages up to the policy's last turn."""
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(
        self, *, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
    ) -> Any:
        said = [(str(message["role"]), text_of(message)) for message in messages]
        if self._known:
            if said[: len(self._known)] != self._known or len(said) == len(self._known):
                raise UsageError(
                    "the environment changes messages that the policy has read or written; "
                    "only environments that add messages can be trained on"
                )
            self._policy.say_all(self.completions, said[len(self._known) :])
        try:
            turn = await self._policy(self.completions)
        except RunFailedError as error:
            self.failure = error
            raise
        message = _message(turn, calls=bool(tools))
        self._known = [*said, ("assistant", message["content"])]
        finish = (
            "length" if not turn.stopped else "tool_calls" if "tool_calls" in message else "stop"
        )
        return resolve("openai.types.chat:ChatCompletion").model_validate(
            {
                "id": f"turn-{self.completions.turns}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            }
        )


def _message(turn: PolicyTurn, *, calls: bool) -> dict[str, Any]:
    """Return a turn as a message of the OpenAI protocol, with its tool calls."""
    found = [call for call in json_calls(turn.text) if not call.wrong] if calls else []
    if not found:
        return {"role": "assistant", "content": turn.text}
    return {
        "role": "assistant",
        "content": JSON_CALL.sub("", turn.text),
        "tool_calls": [
            {
                "id": f"call-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.keywords)},
            }
            for number, call in enumerate(found)
        ],
    }
