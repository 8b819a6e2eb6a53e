"""A request engine that answers from a function, and records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationRequest, RolloutEngine, WeightVersion

Answer = Callable[[GenerationRequest], tuple[int, ...]]


class ScriptedEngine(RolloutEngine):
    """An engine that answers each request after ``delay_s`` with tokens of ``answer``."""

    def __init__(self, answer: Answer, delay_s: float = 0.0) -> None:
        self._answer, self._delay_s = answer, delay_s
        self.requests: list[GenerationRequest] = []
        self.at_once = self.most_at_once = 0

    @property
    def version(self) -> str:
        return "1.0"

    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        self.requests.append(request)
        return asyncio.ensure_future(self._served(request))

    async def _served(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self._delay_s)
        self.at_once -= 1
        tokens = self._answer(request)[: request.options.max_new_tokens]
        options = request.options  # Each answer has a stop string.
        stopped = tokens[-1] in options.stop_token_ids or bool(options.stop_strings)
        return tuple(
            Completion(
                tokens=tokens,
                logprobs=tuple(-0.5 - place for place in range(len(tokens))),
                versions=("1.0",) * len(tokens),
                finish="stop" if stopped else "length",
            )
            for _ in request.keys
        )

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def update_weights(self, version: WeightVersion) -> None:
        raise NotImplementedError

    async def health(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
