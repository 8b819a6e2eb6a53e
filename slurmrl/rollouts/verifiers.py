"""Environments of the package ``verifiers`` 0.1 as episodes, in this process. Torch-free.

Such an environment talks to an OpenAI client. It gets one whose model is the policy: new messages
are added after the tokens that the policy has sampled, as in every episode.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from slurmrl.errors import MissingDependencyError, RunFailedError, UsageError
from slurmrl.registry import resolve
from slurmrl.rollouts.base import EpisodeItem, PolicyTurn
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.environments import JSON_CALL, json_calls
from slurmrl.rollouts.tools.toolbox import Tools

if TYPE_CHECKING:
    from slurmrl.rollouts.policy import Policy

HINT: Final = "pip install 'verifiers>=0.1.9,<0.2'"


class VerifiersEpisode:
    """Episode that runs an environment of the verifiers package.

    :param environment: its id: the name of the installed module that has ``load_environment``.
    :param args: arguments of ``load_environment``.

    The rows of the dataset are the rows of the environment: ``prompt`` (messages), ``answer``,
    ``info``, ``task``. The reward of the last turn is the rubric's reward.
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
                f"verifiers {found} is not supported: it runs environments in processes of their "
                f"own, with an HTTP server; use 0.1: {HINT}"
            )
        try:
            self._environment: Any = verifiers.load_environment(environment, **(args or {}))
        except (ImportError, AttributeError, ValueError, TypeError, RuntimeError) as error:
            raise UsageError(f"verifiers environment '{environment}': {error}") from error
        if getattr(self._environment, "message_type", "chat") != "chat":
            raise UsageError(f"verifiers environment '{environment}' does not use messages")

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        client = PolicyClient(policy, item)
        row = item.row
        prompt = row.get("prompt")
        given = {
            "prompt": prompt if isinstance(prompt, list) else [_user(item.text)],
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
    """The part of ``AsyncOpenAI`` that environments use: ``chat.completions.create``."""

    def __init__(self, policy: Policy, item: EpisodeItem) -> None:
        self._policy = policy
        self.completions = Completions(item.prompt)
        self.failure: RunFailedError | None = None
        """Reason why the engine failed. (The environment takes it for an error of the model.)"""
        self._known: list[tuple[str, str]] = []
        """The messages up to the policy's last turn."""
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(
        self, *, messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
    ) -> Any:
        said = [(str(message["role"]), _text(message)) for message in messages]
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
    """A turn as a message of the OpenAI protocol; its calls of tools as such."""
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


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
