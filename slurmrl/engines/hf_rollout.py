"""Requests served by a model of transformers, in rounds.

S sequences in the batch, V vocabulary, K most tokens of a support.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.data.meta import SampledSupport
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.base import (
    ABORTED,
    Completion,
    Decode,
    GenerationOptions,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.native.sequence import ends_with_stop
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.sampling import NONE, Sampled, keyed_uniform, sample

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel
    from slurmrl.models.hf_session import HFSession

Answer = asyncio.Future[tuple[Completion, ...]]
KEEP_FRACTION = 0.75
"""Ended rows leave the batch once no more than this part of it is alive."""
CHECK_TOKENS = {"cpu": 1, "cuda": 8}
"""Tokens, by type of device, between two checks of which rows have ended. Each makes the host wait
for a GPU. Rows that end in between sample further tokens, which are cut."""


async def _at_once() -> None:
    await asyncio.sleep(0)


class HFRollout(RolloutEngine):
    """Serves all waiting requests together, then those that were submitted during the round.

    A round samples with the same options, except for ``max_new_tokens`` and a ``min_new_tokens``
    that is cut to it. Requests with other options get separate rounds (`split_rounds`).
    """

    def __init__(
        self,
        model: HFModel,
        version: str,
        prefill_tokens: int,
        *,
        rows: int | None = None,
        decode: Decode | None = None,
        support: bool = True,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``rows``: most completions of a round; None for no limit.

        ``decode``, ``support``, ``settled``: see `ServingOptions`. Waiting requests are computed
        after ``settled`` returns.
        """
        self._model, self._version, self._prefill_tokens = model, version, prefill_tokens
        self._rows, self._decode, self._support = rows, decode, support
        self._settled = settled or _at_once
        self._waiting: dict[str, tuple[GenerationRequest, Answer]] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._task: asyncio.Task[None] | None = None
        self._lost: RunFailedError | None = None
        """Why it serves no more requests."""

    @property
    def version(self) -> str:
        return self._version

    def submit(self, request: GenerationRequest) -> Answer:
        future: Answer = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
        elif fault := self._fault(request):
            future.set_exception(UsageError(f"request {request.request_id} {fault}"))
        else:
            self._waiting[request.request_id] = request, future
            self._serve()
        return future

    def abort(self, request_id: str) -> None:
        request, future = self._waiting.pop(request_id, (None, None))
        if request is not None and future is not None and not future.done():
            future.set_result((ABORTED,) * len(request.keys))

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, version: WeightVersion) -> None:
        if version.folder is not None:
            raise UsageError("this engine's weights are moved by the trainers, not read from files")
        self._version = version.name

    async def health(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._fail(RunFailedError("the engine was closed"))

    def _fault(self, request: GenerationRequest) -> str:
        """Return why a request can never be served, or ""."""
        earlier = self._waiting.get(request.request_id)
        faults = {
            "has an empty prompt": not request.prompt,
            "asks for no completion": not request.keys,
            "is in flight already": earlier is not None and not earlier[1].done(),
            "has stop strings, but the engine has no tokenizer": bool(
                request.options.stop_strings and self._decode is None
            ),
            "asks for experts, which models of transformers do not record": request.options.experts,
        }
        return next((fault for fault, holds in faults.items() if holds), "")

    def _serve(self) -> None:
        """Have a task that computes rounds while requests wait."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._check)

    async def _run(self) -> None:
        while self._waiting:
            await self._settled()
            await self._running.wait()
            ready = [pair for pair in self._waiting.values() if not pair[1].done()]
            ready.sort(key=lambda pair: (pair[0].priority, pair[0].request_id))
            answers: dict[str, list[Completion]] = {each.request_id: [] for each, _ in ready}
            for requests in split_rounds([request for request, _ in ready], self._rows):
                for request, made in zip(requests, self._round(requests), strict=True):
                    answers[request.request_id] += made
            self._waiting.clear()
            for request, future in ready:
                future.set_result(tuple(answers[request.request_id]))

    def _check(self, task: asyncio.Task[None]) -> None:
        """Fail the waiting requests if a round has failed."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RunFailedError | UsageError):
            self._fail(error)
        elif error is not None:
            failure = RunFailedError(f"the model failed: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, failure: RunFailedError | UsageError) -> None:
        if isinstance(failure, RunFailedError):
            self._lost = failure
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)
        self._waiting.clear()

    def _round(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Sample all completions of requests. A prompt of several requests is read once."""
        batch = _Batch(requests, self._device, self._decode, support=self._support)
        made = iter(batch.run(self._model, self._prefill_tokens, self._version))
        return [tuple(next(made) for _ in request.keys) for request in requests]

    @property
    def _device(self) -> torch.device:
        return next(self._model.inner.parameters()).device


def split_rounds(
    requests: Sequence[GenerationRequest], rows: int | None
) -> list[list[GenerationRequest]]:
    """Return the requests of each round, which have common options and at most ``rows`` keys.

    A request with more keys is divided.
    """
    alike: dict[object, list[GenerationRequest]] = {}
    for request in requests:
        options = replace(request.options, max_new_tokens=1, min_new_tokens=0)
        alike.setdefault((options, request.seed, request.step), []).append(request)
    rounds: list[list[GenerationRequest]] = []
    for group in alike.values():
        for part in _by_minimum(group):
            rounds += _by_rows(part, rows)
    return rounds


def _by_minimum(requests: Sequence[GenerationRequest]) -> Collection[list[GenerationRequest]]:
    """Divide requests by ``min_new_tokens``, so that each part has a common minimum.

    A request whose minimum is also its maximum has the same tokens with any larger minimum.
    """
    options = [request.options for request in requests]
    minimums = {
        each.min_new_tokens for each in options if each.min_new_tokens < each.max_new_tokens
    }
    parts: dict[int | None, list[GenerationRequest]] = {}
    for request, each in zip(requests, options, strict=True):
        least = each.min_new_tokens
        if least == each.max_new_tokens:
            larger = [minimum for minimum in minimums if minimum >= least]
            parts.setdefault(min(larger, default=None), []).append(request)
        else:
            parts.setdefault(least, []).append(request)
    return parts.values()


def _by_rows(
    requests: Sequence[GenerationRequest], rows: int | None
) -> Iterator[list[GenerationRequest]]:
    """Yield the requests in parts of at most ``rows`` keys, without a limit in one."""
    if rows is None:
        yield list(requests)
        return
    part: list[GenerationRequest] = []
    free = rows
    for request in requests:
        keys = request.keys
        while keys:
            part.append(replace(request, keys=keys[:free]))
            keys, free = keys[free:], free - len(part[-1].keys)
            if not free:
                yield part
                part, free = [], rows
    if part:
        yield part


def _common(requests: Sequence[GenerationRequest]) -> GenerationOptions:
    """Return the options of all requests, with the largest limits.

    (A request that is cut before the others' ``min_new_tokens`` has the same tokens with it.)
    """
    every = [request.options for request in requests]
    most = max(options.max_new_tokens for options in every)
    least = max(options.min_new_tokens for options in every)
    widest = [replace(each, max_new_tokens=most, min_new_tokens=least) for each in every]
    settings = zip(widest, requests, strict=True)
    kinds = {(options, request.seed, request.step) for options, request in settings}
    cut = all(each.min_new_tokens == min(least, each.max_new_tokens) for each in every)
    assert cut, "`split_rounds` puts other minimums into other rounds"
    ((options, _, _),) = kinds
    return options


@dataclass(frozen=True)
class _SampledPart:
    """The tokens that the rows of the batch sampled between two checks."""

    rows: list[int]
    samples: list[Sampled]
    """Each [S]; those after a row's last token do not count."""


class _Batch:
    """The completions of a round. Every row that is alive has the same number of new tokens."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        device: torch.device,
        decode: Decode | None,
        *,
        support: bool,
    ) -> None:
        self._options, self._decode, self._support = _common(requests), decode, support
        self._seed, self._step = requests[0].seed, requests[0].step
        numbers: dict[tuple[int, ...], int] = {}
        rows = [
            (numbers.setdefault(request.prompt, len(numbers)), key, request.options.max_new_tokens)
            for request in requests
            for key in request.keys
        ]
        self._prompts = list(numbers)
        prompts, keys, limits = (torch.tensor(column) for column in zip(*rows, strict=True))
        self._order = prompts.tolist()
        """The prompt of each row."""
        self._most = int(limits.max())
        self._longest = max(len(self._prompts[number]) + limit for number, _, limit in rows)
        stops = torch.tensor(self._options.stop_token_ids, dtype=torch.int64)
        self._index, self._keys, self._limits, self._stops = upload(
            [prompts, keys, limits, stops], device
        )
        self._every = CHECK_TOKENS[device.type]
        self._rows = list(range(len(rows)))
        """The rows in the batch."""
        self._new = [0] * len(rows)
        self._stopped = [False] * len(rows)
        """Whether each row had stopped at the last check, like ``_new``."""
        self._tokens: list[list[int]] = [[] for _ in rows]
        """The new tokens of all rows as of the last check, if there are stop strings."""
        self._count = 0
        """Tokens that each row that is alive has sampled."""
        self._samples: list[Sampled] = []
        """Since the last check."""
        self._parts: list[_SampledPart] = []
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._counts = torch.zeros_like(self._keys)
        """New tokens of each row in the batch, as ``_alive`` and ``_ended``."""
        self._alive = torch.ones_like(self._keys, dtype=torch.bool)
        self._ended = torch.zeros_like(self._alive)
        """With a stop token."""
        self._last = self._counts
        """The token that each row in the batch sampled last."""

    @torch.no_grad()
    def run(self, model: HFModel, prefill_tokens: int, version: str) -> list[Completion]:
        """Sample until all rows have ended.

        The sample of a token depends on (seed, step, the row's key, the token's position in its
        sequence) and on the logits only.
        """
        lengths = [len(prompt) for prompt in self._prompts]
        session = model.session(lengths, self._longest, prefill_tokens)
        tokens = torch.tensor([token for prompt in self._prompts for token in prompt])
        logits = session.prompts(upload([tokens], self._keys.device)[0])
        if self._order != list(range(len(self._prompts))):
            session.keep(self._index)
            logits = logits[self._index]
        while True:
            self._sample(logits, session.lengths)
            if self._over(session):
                return self._completions(version)
            logits = session.next(self._last, self._alive)

    def _sample(self, logits: Tensor, positions: Tensor) -> None:
        """Sample a token for every row in the batch from logits [S, V]."""
        options = self._options
        drawn = sample(
            logits,
            keyed_uniform(self._seed, self._step, self._keys, positions),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            greedy=options.greedy,
            banned=self._stops if self._count < options.min_new_tokens else None,
            support=self._support,
            record=options.support,
        )
        self._count += 1
        self._samples.append(drawn)
        self._finite = self._finite & torch.isfinite(drawn.logprobs).all()
        self._counts = self._counts + self._alive
        stopped = torch.isin(drawn.tokens, self._stops)
        self._ended = self._ended | (self._alive & stopped)
        self._alive = self._alive & ~stopped & (self._counts < self._limits)
        self._last = drawn.tokens

    def _over(self, session: HFSession) -> bool:
        """Whether all rows have ended, as far as the host knows.

        Remove ended rows from the batch once there are enough of them to pay for the copy.

        Raises RunFailedError if logits were not finite.
        """
        limit = self._count == self._most
        if not limit and self._count % self._every:
            return False
        left = self._check()
        if limit or not left:
            return True
        if len(left) <= KEEP_FRACTION * len(self._rows):
            self._keep(left, session)
        return False

    def _check(self) -> list[int]:
        """Read which rows of the batch are alive; return their places in it."""
        state = [self._alive.long(), self._counts, self._ended.long(), self._finite.long()[None]]
        *values, finite = torch.cat(state).tolist()
        if not finite:
            raise RunFailedError("the model's logits are not finite: its weights have diverged")
        size = len(self._rows)
        alive, counts, ended = (values[first : first + size] for first in range(0, 3 * size, size))
        if self._options.stop_strings:
            for place, count in self._cut(counts).items():
                alive[place], counts[place], ended[place] = 0, count, 1
        for row, count, stopped in zip(self._rows, counts, ended, strict=True):
            self._new[row], self._stopped[row] = count, bool(stopped)
        self._parts.append(_SampledPart(self._rows, self._samples))
        self._samples = []
        return [place for place, unfinished in enumerate(alive) if unfinished]

    def _cut(self, counts: Sequence[int]) -> dict[int, int]:
        """End the rows in which a stop string was completed since the last check.

        ``counts`` are the new tokens of the rows in the batch. Return the places of the rows that
        ended, each with its new tokens, of which the last one completes the string.
        """
        assert self._decode is not None, "a request with stop strings needs it"
        sampled = torch.stack([each.tokens for each in self._samples]).t().tolist()
        found: dict[int, int] = {}
        for place, (row, count) in enumerate(zip(self._rows, counts, strict=True)):
            tokens = self._tokens[row]
            first = len(tokens)
            tokens += sampled[place][: count - first]
            for new in range(max(first, self._options.min_new_tokens) + 1, count + 1):
                if ends_with_stop(self._decode, tokens[:new], self._options.stop_strings):
                    found[place] = new
                    del tokens[new:]
                    break
        if found:
            values = torch.tensor(list(found)), torch.tensor(list(found.values()))
            places, ends = upload(values, self._keys.device)
            self._alive[places], self._ended[places] = False, True
            self._counts[places] = ends
        return found

    def _keep(self, left: list[int], session: HFSession) -> None:
        """Remove all rows of the batch but these."""
        self._rows = [self._rows[place] for place in left]
        (index,) = upload([torch.tensor(left)], self._keys.device)
        session.keep(index)
        self._keys, self._limits, self._last = (
            each[index] for each in (self._keys, self._limits, self._last)
        )
        self._alive, self._counts, self._ended = (
            each[index] for each in (self._alive, self._counts, self._ended)
        )

    def _completions(self, version: str) -> list[Completion]:
        tokens: list[list[int]] = [[] for _ in self._new]
        logprobs: list[list[float]] = [[] for _ in self._new]
        supports = [SampledSupport() for _ in self._new]
        for part in self._parts:
            ids = torch.stack([each.tokens for each in part.samples]).t().tolist()
            values = torch.stack([each.logprobs for each in part.samples]).t().tolist()
            for place, row in enumerate(part.rows):
                tokens[row] += ids[place]
                logprobs[row] += values[place]
            if self._options.support:
                self._add_supports(part, supports)
        return [
            Completion(
                tokens=tuple(tokens[row][:new]),
                logprobs=tuple(logprobs[row][:new]),
                versions=(version,) * new,
                finish="stop" if self._stopped[row] else "length",
                support=supports[row].cut([new])[0] if self._options.support else None,
            )
            for row, new in enumerate(self._new)
        ]

    def _add_supports(self, part: _SampledPart, supports: list[SampledSupport]) -> None:
        for each in part.samples:
            assert each.support is not None, "it was asked for"
            for row, ids in zip(part.rows, each.support.tolist(), strict=True):
                supports[row].add([token for token in ids if token != NONE])
