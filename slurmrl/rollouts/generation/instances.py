"""One engine for several servers: route requests by prefix, and handle the loss of a server."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import (
    ABORTED,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.server_instance import Connect, Instance, Patience

MOST_ATTEMPTS = 8
"""Maximum number of attempts of a request. An attempt fails if its instance is lost."""

Answer = tuple[Completion, ...]
BLOCK = 16
"""Number of tokens of a block, the unit by which prefixes are compared."""
MOST_BLOCKS = 2**17
"""Maximum number of remembered blocks. The least recently used blocks are forgotten first."""


@dataclass(order=True)
class _Waiting:
    """A request; objects sort by the order in which they are sent."""

    priority: int
    order: int
    request: GenerationRequest = field(compare=False)
    future: asyncio.Future[Answer] = field(compare=False)
    attempts: int = field(compare=False, default=0)
    at: int | None = field(compare=False, default=None)
    """Number of the instance that processes the request; None while the request waits."""
    answer: asyncio.Future[Answer] | None = field(compare=False, default=None)
    aborted: bool = field(compare=False, default=False)

    @property
    def cost(self) -> int:
        """Maximum number of tokens that an instance has to compute for the request."""
        request = self.request
        return len(request.prompt) + len(request.keys) * request.options.max_new_tokens


class Instances(RolloutEngine):
    """Sends each request to one of several instances.

    An instance gets requests only while it has the newest weight version. A request goes to the
    instance that has the request's prefix in its cache, unless another instance has a much lower
    load. If an instance is lost, its requests are sent again. Samples do not depend on the
    instance. While no instance is usable, requests wait for at most ``wait_s`` seconds, or until
    all instances have been given up.
    """

    def __init__(
        self,
        connects: Mapping[str, Connect],
        patience: Patience,
        *,
        program: ServerProgram | None = None,
        wait_s: float | None = None,
        concurrency: int = 256,
    ) -> None:
        """Start to connect to the instances. The caller must be in a running asyncio loop.

        ``connects`` maps an instance's name in messages to its connecting function. ``program``
        starts the server of the only instance. ``concurrency``: number of completions that an
        instance samples at a time. The last request may exceed this number: requests are not split.
        """
        self._concurrency = concurrency
        self._wanted: WeightVersion | None = None
        self._paused = False
        self._wait_s = wait_s
        self._jobs: dict[str, _Waiting] = {}
        self._queue: list[_Waiting] = []
        self._order = itertools.count()
        self._prefixes = PrefixIndex()
        self._closed = False
        self._usable = asyncio.Event()
        """Set after the first instance has become usable."""
        self._giving_up: asyncio.TimerHandle | None = None
        self._instances = [
            Instance(
                name,
                connect,
                patience,
                program=program,
                wanted=self._state,
                came=self._came,
                went=self._went,
            )
            for name, connect in connects.items()
        ]
        self._expect_instances()

    async def start(self) -> None:
        """Return when an instance can be used.

        On failure, close all instances. Raises UsageError if an instance will never be usable.
        Raises RunFailedError if all instances were given up, or if all first attempts failed and no
        instance is usable within ``wait_s``.
        """
        await asyncio.wait([instance.tried for instance in self._instances])
        errors = [instance.error for instance in self._instances if instance.error is not None]
        unusable = next((error for error in errors if isinstance(error, UsageError)), None)
        try:
            if (error := unusable or self._given_up()) is not None:
                raise error
            async with asyncio.timeout(self._wait_s):
                await self._usable.wait()
        except TimeoutError as error:
            await self.close()
            raise RunFailedError(f"no server can be used: {self._reasons()}") from error
        except SlurmrlError:
            await self.close()
            raise

    @property
    def version(self) -> str | None:
        return None if self._wanted is None else self._wanted.name

    def submit(self, request: GenerationRequest) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(RunFailedError("the engine was closed"))
        elif (lost := self._given_up()) is not None:
            future.set_exception(lost)
        elif request.request_id in self._jobs:
            future.set_exception(UsageError(f"request {request.request_id} is in flight already"))
        else:
            job = _Waiting(request.priority, next(self._order), request, future)
            self._jobs[request.request_id] = job
            future.add_done_callback(lambda _: self._forget(job))
            heapq.heappush(self._queue, job)
            self._dispatch()
        return future

    def abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.aborted = True
        if job.at is None:
            self._answer_aborted(job)
        elif (engine := self._instances[job.at].engine) is not None:
            engine.abort(request_id)

    async def pause(self) -> None:
        self._paused = True
        await asyncio.gather(*(instance.pause() for instance in self._instances))

    async def resume(self) -> None:
        self._paused = False
        await asyncio.gather(*(instance.resume() for instance in self._instances))
        self._dispatch()

    async def update_weights(self, version: WeightVersion) -> None:
        """Load ``version`` on all instances.

        Failed instances are lost, and load the version before they get another request. Raises
        UsageError if an instance rejects the version and no instance accepts it. The last version
        then remains.
        """
        before, self._wanted = self._wanted, version
        updates = (instance.update(version) for instance in self._instances)
        results = await asyncio.gather(*updates, return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        refused = all(isinstance(error, UsageError) for error in errors)
        taken = any(instance.version == version.name for instance in self._instances)
        if errors and not (refused and taken):
            self._wanted = before
            raise errors[0]
        self._prefixes = PrefixIndex()  # the update has cleared the caches
        self._dispatch()

    async def sleep(self) -> None:
        """Free the device memory of this run's servers until the next `update_weights`."""
        self._wanted = None
        await asyncio.gather(*(instance.sleep() for instance in self._instances))

    async def health(self) -> None:
        if not any(instance.engine for instance in self._instances):
            raise RunFailedError(f"no instance can be used: {self._reasons()}")

    async def close(self) -> None:
        self._closed = True
        self._fail_all(RunFailedError("the engine was closed"))
        if self._giving_up is not None:
            self._giving_up.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances))

    def _state(self) -> tuple[WeightVersion | None, bool]:
        return self._wanted, self._paused

    def _came(self, instance: Instance) -> None:
        self._usable.set()
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        self._dispatch()

    def _went(self, instance: Instance) -> None:
        self._prefixes.forget(self._instances.index(instance))
        self._expect_instances()

    def _expect_instances(self) -> None:
        """If no instance can be used, let requests wait for at most ``wait_s``."""
        if (lost := self._given_up()) is not None:
            self._fail_all(lost)
        elif (
            self._wait_s is not None
            and self._giving_up is None
            and not any(i.engine for i in self._instances)
        ):
            loop = asyncio.get_running_loop()
            self._giving_up = loop.call_later(self._wait_s, self._stop_waiting)

    def _given_up(self) -> SlurmrlError | None:
        """Return why no instance will be usable again; None if an instance may be."""
        reasons = [instance.given_up for instance in self._instances]
        return None if None in reasons else reasons[0]

    def _stop_waiting(self) -> None:
        self._giving_up = None
        message = f"all instances were unusable for {self._wait_s:g} s: {self._reasons()}"
        self._fail_all(RunFailedError(message))
        self._expect_instances()

    def _reasons(self) -> str:
        return "; ".join(f"{each.name}: {each.error or 'starting'}" for each in self._instances)

    def _fail_all(self, error: SlurmrlError) -> None:
        for job in list(self._jobs.values()):
            if not job.future.done():
                job.future.set_exception(error)

    def _forget(self, job: _Waiting) -> None:
        """Forget a request whose future is done: answered, failed or cancelled."""
        del self._jobs[job.request.request_id]
        if job.answer is not None:
            job.answer.cancel()

    def _answer_aborted(self, job: _Waiting) -> None:
        if not job.future.done():
            job.future.set_result((ABORTED,) * len(job.request.keys))

    def _dispatch(self) -> None:
        """Send waiting requests to instances below their concurrency."""
        while self._queue and (ready := self._ready()):
            job = heapq.heappop(self._queue)
            if not job.future.done():
                self._send(job, self._choose(job, ready))

    def _ready(self) -> list[int]:
        """Return the instances with the current version that are below their concurrency."""
        return [
            index
            for index, instance in enumerate(self._instances)
            if instance.version is not None
            and instance.version == self.version
            and instance.sequences < self._concurrency
        ]

    def _choose(self, job: _Waiting, ready: list[int]) -> int:
        """Return the instance that has the longest part of the request's prefix in its cache.

        Instances whose load is much higher than the lowest load are not considered.
        """
        load = {index: self._instances[index].load for index in ready}
        least = min(load.values())
        matches = self._prefixes.matches(job.request.prompt)
        near = [index for index in ready if load[index] <= 2 * least + job.cost]
        return max(near, key=lambda index: (matches.get(index, 0), -load[index]))

    def _send(self, job: _Waiting, index: int) -> None:
        instance = self._instances[index]
        assert instance.engine is not None
        instance.sequences += len(job.request.keys)
        instance.load += job.cost
        instance.asked()
        self._prefixes.remember(job.request.prompt, index)
        job.at = index
        job.attempts += 1
        job.answer = instance.engine.submit(job.request)
        job.answer.add_done_callback(lambda answer: self._ended(job, index, answer))

    def _ended(self, job: _Waiting, index: int, answer: asyncio.Future[Answer]) -> None:
        instance = self._instances[index]
        instance.sequences -= len(job.request.keys)
        instance.load -= job.cost
        job.at = job.answer = None
        error = None if answer.cancelled() else answer.exception()
        if job.future.done() or answer.cancelled():
            pass
        elif error is None:
            instance.heard()
            self._remember(job, index, answer.result())
            job.future.set_result(answer.result())
        elif not isinstance(error, RunFailedError) or job.attempts >= MOST_ATTEMPTS:
            job.future.set_exception(error)
        else:
            instance.doubt()
            self._issue_again(job)
        self._dispatch()

    def _issue_again(self, job: _Waiting) -> None:
        if job.aborted:
            self._answer_aborted(job)
        else:
            heapq.heappush(self._queue, job)

    def _remember(self, job: _Waiting, index: int, completions: Answer) -> None:
        """Remember an answer's prefixes. The next turn of an episode begins with the answer."""
        if self._instances[index].engine is not None:
            for completion in completions:
                self._prefixes.remember(job.request.prompt + completion.tokens, index)


class PrefixIndex:
    """Remembers which instances have processed which prefixes. Instances are numbers.

    The key of a block is a hash of all tokens up to its end. If two prefixes have the same hash, a
    request may go to an instance without its prefix, which only costs time.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._owners: OrderedDict[int, frozenset[int]] = OrderedDict()
        self._most = most_blocks

    def remember(self, tokens: Sequence[int], instance: int) -> None:
        """Record that ``instance`` processes ``tokens``."""
        for block in _blocks(tokens):
            self._owners[block] = self._owners.get(block, frozenset()) | {instance}
            self._owners.move_to_end(block)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def matches(self, tokens: Sequence[int]) -> dict[int, int]:
        """Map each instance to the length of the prefix of ``tokens`` that it has processed."""
        found: dict[int, int] = {}
        for number, block in enumerate(_blocks(tokens), start=1):
            owners = self._owners.get(block)
            if owners is None:
                break
            for owner in owners:
                if found.get(owner, 0) == (number - 1) * BLOCK:
                    found[owner] = number * BLOCK
        return found

    def forget(self, instance: int) -> None:
        """Record that ``instance`` has lost its cache."""
        for block, owners in list(self._owners.items()):
            if instance in owners:
                if len(owners) == 1:
                    del self._owners[block]
                else:
                    self._owners[block] = owners - {instance}


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yield a hash of each prefix of whole blocks."""
    state = 0
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        state = hash((state, *tokens[begin : begin + BLOCK]))
        yield state
