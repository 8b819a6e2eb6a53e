"""Requests served by an engine that generates whole batches with all ranks of its model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import SampledSupport
from slurmrl.engines.base import PROMPTS, GenerateEngine
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.generate import GenerationOptions, GenerationOutput
from slurmrl.rollouts.generation.base import (
    Completion,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.tensors.ops.collectives import broadcast_bytes

T = TypeVar("T")
Answer = asyncio.Future[tuple[Completion, ...]]


class LockstepEngine(RolloutEngine):
    """Serves all requests that wait in one collective call, then those that wait after it, on all
    ranks of the model alike. The leaders of the data-parallel ranks run what submits requests; the
    other ranks compute what their leader sends them.

    All requests of a call have the same sampling options, except for ``max_new_tokens`` and a
    ``min_new_tokens`` that is cut to it.
    """

    def __init__(self, engine: GenerateEngine, version: str) -> None:
        self._engine, self._version = engine, version
        self._waiting: dict[str, tuple[GenerationRequest, Answer]] = {}
        self._running = asyncio.Event()
        self._running.set()

    @property
    def version(self) -> str:
        return self._version

    def submit(self, request: GenerationRequest) -> Answer:
        future: Answer = asyncio.get_running_loop().create_future()
        if not request.prompt:
            future.set_exception(UsageError(f"request {request.request_id} has an empty prompt"))
        elif request.request_id in self._waiting:
            future.set_exception(UsageError(f"there is a request {request.request_id} already"))
        else:
            self._waiting[request.request_id] = request, future
        return future

    def abort(self, request_id: str) -> None:
        request, future = self._waiting.pop(request_id, (None, None))
        if request is not None and future is not None and not future.done():
            none = Completion(tokens=(), logprobs=(), versions=(), finish="aborted")
            future.set_result((none,) * len(request.keys))

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, version: WeightVersion) -> None:
        if version.folder is not None:
            raise UsageError("this engine's weights are moved by the trainers, not read from files")
        self._version = version.name

    async def health(self) -> None:
        pass

    async def close(self) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(RunFailedError("the engine was closed"))
        self._waiting.clear()

    def run(
        self, work: Callable[[], Coroutine[Any, Any, T]], settled: Callable[[], Awaitable[None]]
    ) -> T | None:
        """Run ``work`` in an event loop on this rank if it is a leader, and serve its requests
        until the work of all ranks is done; None on the others. ``settled`` waits until nothing
        submits a request before some are answered. Collective over the model's ranks."""
        if self._engine.context.is_leader:
            with asyncio.Runner() as runner:
                return runner.run(self._lead(work(), settled))
        while self._step([]):
            pass
        return None

    async def _lead(
        self, work: Coroutine[Any, Any, T], settled: Callable[[], Awaitable[None]]
    ) -> T:
        task = asyncio.ensure_future(work)
        try:
            while True:
                # An event of its own: what is settled may also be over.
                waiter = asyncio.ensure_future(settled())
                await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
                await _cancelled(waiter)
                if task.done() and task.exception() is not None:
                    return task.result()
                await self._running.wait()
                if not self._step(self._ready()):
                    return await task
        finally:
            await _cancelled(task)

    def _ready(self) -> list[tuple[GenerationRequest, Answer]]:
        """The requests to serve now, in the order of their priorities and ids."""
        waiting = [(request, future) for request, future in self._waiting.values()]
        self._waiting.clear()
        ready = [(request, future) for request, future in waiting if not future.done()]
        return sorted(ready, key=lambda pair: (pair[0].priority, pair[0].request_id))

    def _step(self, ready: Sequence[tuple[GenerationRequest, Answer]]) -> bool:
        """Answer requests. Returns whether any rank had one. Collective."""
        requests = self._shared([request for request, _ in ready])
        if not self._any(bool(requests)):
            return False
        answers = self._generate(requests)
        for (_, future), answer in zip(ready, answers, strict=False):
            future.set_result(answer)
        return True

    def _shared(self, requests: list[GenerationRequest]) -> list[GenerationRequest]:
        """The leader's requests, on every rank that computes the same."""
        context = self._engine.context
        if "data" not in context.groups:
            return requests
        content = json.dumps([asdict(request) for request in requests]).encode()
        received = broadcast_bytes(content, context.group("data"), context.device)
        return [GenerationRequest.from_values(values) for values in json.loads(received)]

    def _any(self, own: bool) -> bool:
        """Whether a rank says yes."""
        context = self._engine.context
        if context.dp_size == 1:
            return own
        flag = torch.tensor(int(own), device=context.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=context.group("dp"))
        return bool(flag)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Collective. Draws do not depend on how long others may become, so all rows are generated
        up to the largest limit and cut at their own."""
        options = _common(requests)
        rows = _grouped(requests)
        first = requests[0] if requests else None
        prompts = [row.prompt for row in rows]
        sample = SequenceSample.from_default(
            [len(prompt) for prompt in prompts],
            [str(number) for number in range(len(prompts))],
            {PROMPTS: torch.tensor([token for prompt in prompts for token in prompt]).long()},
        )
        output = self._engine.generate(
            sample,
            options,
            seed=first.seed if first else 0,
            step=first.step if first else 0,
            keys=torch.tensor([key for row in rows for key, _, _ in row.draws], dtype=torch.int64),
        )
        return self._answers(requests, rows, output)

    def _answers(
        self,
        requests: Sequence[GenerationRequest],
        rows: Sequence[_Row],
        output: GenerationOutput,
    ) -> list[tuple[Completion, ...]]:
        tokens, logprobs = output.tokens.tolist(), output.logprobs.tolist()
        ends = list(accumulate(output.lengths.tolist(), initial=0))
        draws = [draw for row in rows for draw in row.draws]
        supports, experts = _supports(output), output.experts
        made: list[dict[int, Completion]] = [{} for _ in requests]
        for row, ((_, number, place), (start, stop), prompt, stopped, support) in enumerate(
            zip(
                draws,
                pairwise(ends),
                output.prompt_lengths.tolist(),
                output.finished.tolist(),
                supports,
                strict=True,
            )
        ):
            begin, most = start + prompt, requests[number].options.max_new_tokens
            end = min(stop, begin + most)
            made[number][place] = Completion(
                tokens=tuple(tokens[begin:end]),
                logprobs=tuple(logprobs[begin:end]),
                versions=(self._version,) * (end - begin),
                finish="stop" if stopped and end == stop else "length",
                support=None if support is None else support.cut([prompt, end - begin])[1],
                experts=None if experts is None else experts[row][: end - start],
            )
        return [tuple(found[place] for place in sorted(found)) for found in made]


def _supports(output: GenerationOutput) -> list[SampledSupport] | list[None]:
    """Of each sequence."""
    if output.support is None:
        return [None] * len(output.lengths)
    return output.support.cut(output.lengths.tolist())


class _Row:
    """A prompt, and the draws behind it: (key, number of the request, place in it)."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.draws: list[tuple[int, int, int]] = []


def _grouped(requests: Sequence[GenerationRequest]) -> list[_Row]:
    """One row for each prompt, which is read once, if all have equally many draws; else one for
    each draw, since a call has one number for all."""
    by_prompt: dict[tuple[int, ...], _Row] = {}
    for number, request in enumerate(requests):
        row = by_prompt.setdefault(request.prompt, _Row(request.prompt))
        row.draws += [(key, number, place) for place, key in enumerate(request.keys)]
    if len({len(row.draws) for row in by_prompt.values()}) <= 1:
        return list(by_prompt.values())
    alone = []
    for row in by_prompt.values():
        for draw in row.draws:
            single = _Row(row.prompt)
            single.draws.append(draw)
            alone.append(single)
    return alone


def _common(requests: Sequence[GenerationRequest]) -> GenerationOptions:
    """The options of all requests, with the largest limits. (A request that is cut before the
    others' least number of tokens has the same tokens with it.)"""
    if not requests:
        return GenerationOptions(max_new_tokens=1)
    every = [request.options for request in requests]
    most = max(options.max_new_tokens for options in every)
    least = max(options.min_new_tokens for options in every)
    widest = [replace(each, max_new_tokens=most, min_new_tokens=least) for each in every]
    settings = zip(widest, requests, strict=True)
    kinds = {(options, request.seed, request.step) for options, request in settings}
    cut = all(each.min_new_tokens == min(least, each.max_new_tokens) for each in every)
    if len(kinds) > 1 or not cut:
        raise UsageError("the requests of one call differ in sampling options, seed or step")
    ((options, _, _),) = kinds
    return options


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.wait((task,))
