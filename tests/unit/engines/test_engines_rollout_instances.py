"""Requests to server instances that end, hang, restart and are updated, in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import Thread
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.engines.server_engine import DistantEngine
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import (
    ABORTED,
    GenerationOptions,
    GenerationRequest,
    RolloutEngine,
    WeightVersion,
)
from slurmrl.rollouts.generation.instances import BLOCK, MOST_ATTEMPTS, Instances, PrefixIndex
from slurmrl.rollouts.generation.server_instance import Patience

PATIENCE = Patience(start_s=20.0, silence_s=5.0, probe_s=2.0)
AT_ONCE = 6


class VirtualSelector(selectors.DefaultSelector):
    """A selector for virtual time: time advances without waiting when nothing is ready."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("nothing will ever happen again")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = VirtualSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in virtual time, for a day of it at most."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(86400):
                await test(*arguments, **named)

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(bounded())

    return run


State = Literal["up", "hung", "dead"]


class FakeServer:
    """A server that outlives its engines, whose behavior depends on ``state``."""

    def __init__(self) -> None:
        self.state: State = "up"
        self.most = 0
        self.served: list[str] = []
        self.blind = False
        """Whether it sees no folder with weights."""
        self.failing: SlurmrlError | None = None
        """Fails each request, while the server is healthy."""
        self.refusing: SlurmrlError | None = None
        """Fails each attempt to connect."""
        self.engine: FakeEngine | None = None

    async def connect(self) -> Any:
        if self.refusing is not None:
            raise self.refusing
        await self.answer(1.0)
        self.engine = FakeEngine(self)
        return self.engine

    async def answer(self, after_s: float) -> None:
        """Answer after a time, never answer, or fail, depending on ``state``."""
        end = asyncio.get_running_loop().time() + after_s
        while self.state == "hung" or asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.25)
            if self.state == "dead":
                raise RunFailedError("connection refused")
        if self.state == "dead":
            raise RunFailedError("connection refused")


class FakeEngine(RolloutEngine):
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self._version: str | None = None
        self._held = "none"
        """During an update, what it held before."""
        self._tasks: dict[str, asyncio.Task[tuple[Completion, ...]]] = {}
        self._sequences = 0
        self._aborted: set[str] = set()

    @property
    def version(self) -> str | None:
        return self._version

    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        assert self._version is not None
        future: asyncio.Future[tuple[Completion, ...]]
        future = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._serve(request))
        self._tasks[request.request_id] = task

        def answer(done: asyncio.Task[tuple[Completion, ...]]) -> None:
            if future.done():
                return
            if done.cancelled():
                future.set_exception(RunFailedError("closed"))
            elif (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        task.add_done_callback(answer)
        future.add_done_callback(lambda _: task.cancel())
        return future

    async def _serve(self, request: GenerationRequest) -> tuple[Completion, ...]:
        self._sequences += len(request.keys)
        self.server.most = max(self.server.most, self._sequences)
        self.server.served.append(request.request_id)
        try:
            if self.server.failing is not None:
                raise self.server.failing
            await self.server.answer(len(request.prompt) / 16)
        finally:
            self._sequences -= len(request.keys)
        if request.request_id in self._aborted:
            return (ABORTED,) * len(request.keys)
        return tuple(
            Completion(tokens=(key,), logprobs=(-1.0,), versions=(self._held,), finish="stop")
            for key in request.keys
        )

    def abort(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._aborted.add(request_id)

    async def pause(self) -> None:
        await self.server.answer(0.0)

    async def resume(self) -> None:
        await self.server.answer(0.0)

    async def update_weights(self, version: WeightVersion) -> None:
        self._version = None
        if version.name == "bad" or self.server.blind:
            raise UsageError("weight version bad: no such folder")
        await self.server.answer(0.5)
        self._version = self._held = version.name

    async def health(self) -> None:
        await self.server.answer(0.0)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()


def request(name: str, prompt: Sequence[int] = (1,) * 16, keys: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt=tuple(prompt),
        keys=tuple(range(keys)),
        seed=0,
        step=0,
        options=GenerationOptions(max_new_tokens=16),
    )


def instances_of(servers: Sequence[FakeServer], **options: Any) -> Instances:
    connects = {f"server {index}": server.connect for index, server in enumerate(servers)}
    return Instances(connects, PATIENCE, concurrency=AT_ONCE, **options)


async def serving(servers: Sequence[FakeServer], **options: Any) -> Instances:
    instances = instances_of(servers, **options)
    await instances.start()
    await instances.update_weights(WeightVersion(name="1"))
    return instances


@dataclass(frozen=True)
class Event:
    after_s: float
    what: Literal["up", "hung", "dead", "submit", "abort", "cancel", "update", "pause", "resume"]
    number: int
    """Of a server, or of a request."""


EVENTS = st.lists(
    st.builds(
        Event,
        after_s=st.sampled_from([0.0, 0.1, 0.6, 1.3, 7.0, 30.0]),
        what=st.sampled_from(
            ["up", "hung", "dead", "submit", "submit", "submit", "abort", "cancel", "update"]
        ),
        number=st.integers(0, 11),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(events=EVENTS, count=st.integers(1, 3))
@in_virtual_time
async def test_each_request_is_answered_once_with_current_or_later_weights(
    events: list[Event], count: int
) -> None:
    """This holds for any behavior of instances that return in the end."""
    servers = [FakeServer() for _ in range(count)]
    instances = await serving(servers, wait_s=10000.0)
    futures: list[asyncio.Future[tuple[Completion, ...]]] = []
    oldest: list[int] = []  # the minimum version of each request
    aborted: set[int] = set()
    updates, latest = [], 1
    for event in events:
        await asyncio.sleep(event.after_s)
        match event.what:
            case "submit":
                prompt = (event.number,) * (16 + 16 * (event.number % 3))
                sent = request(f"r{len(futures)}", prompt, keys=1 + event.number % 4)
                oldest.append(int(instances.version or 0))
                futures.append(instances.submit(sent))
            case "abort" | "cancel" if futures:
                chosen = event.number % len(futures)
                aborted.add(chosen)
                if event.what == "abort":
                    instances.abort(f"r{chosen}")
                else:
                    futures[chosen].cancel()
            case "update":
                await asyncio.gather(*updates)  # a trainer sends versions one after the other
                latest += 1
                version = WeightVersion(name=str(latest))
                updates = [asyncio.create_task(instances.update_weights(version))]
            case "up" | "hung" | "dead" as state:
                servers[event.number % count].state = state
    for server in servers:
        server.state = "up"
    await asyncio.gather(*updates)
    for index, future in enumerate(futures):
        if future.cancelled():
            assert index in aborted
            continue
        results = await future
        if ABORTED in results:
            assert index in aborted
            continue
        assert [result.tokens for result in results] == [(key,) for key in range(len(results))]
        (version,) = {version for result in results for version in result.versions}
        assert oldest[index] <= int(version) <= latest
    await asyncio.sleep(0.01)  # the request after an answer
    assert all(server.most <= AT_ONCE + 3 for server in servers)
    assert [(each.sequences, each.load) for each in instances._instances] == [(0, 0)] * count
    await instances.close()


@in_virtual_time
async def test_lost_instance_loses_only_its_own_requests() -> None:
    servers = [FakeServer(), FakeServer()]
    instances = await serving(servers)
    sent = [request(f"r{index}", (index,) * 32) for index in range(8)]
    futures = [instances.submit(each) for each in sent]
    await asyncio.sleep(0.5)
    lost = set(servers[0].served)
    servers[0].state = "hung"
    assert len(await asyncio.gather(*futures)) == 8
    assert len(lost) == 4
    assert sorted(servers[1].served) == sorted(each.request_id for each in sent)
    assert asyncio.get_running_loop().time() < 30
    await instances.close()


@pytest.mark.parametrize("after_s", [0.5, 1.1, 1.4, 1.6])
@in_virtual_time
async def test_instance_gets_a_version_published_during_its_preparation(after_s: float) -> None:
    """The instance connects, loads the previous version, or has just loaded it."""
    server = FakeServer()
    instances = instances_of([server])
    updates = [asyncio.create_task(instances.update_weights(WeightVersion(name="1")))]
    await asyncio.sleep(after_s)
    await instances.update_weights(WeightVersion(name="2"))
    (result,) = await instances.submit(request("r"))
    assert result.versions == ("2",)
    await asyncio.gather(*updates)
    await instances.close()


@in_virtual_time
async def test_update_does_not_wait_forever_for_a_hanging_instance() -> None:
    servers = [FakeServer(), FakeServer()]
    instances = await serving(servers)
    servers[0].state = "hung"
    begin = asyncio.get_running_loop().time()
    await instances.update_weights(WeightVersion(name="2"))
    assert asyncio.get_running_loop().time() - begin <= PATIENCE.silence_s + PATIENCE.start_s
    (result,) = await instances.submit(request("r"))
    assert result.versions == ("2",)
    await instances.close()


@in_virtual_time
async def test_version_rejected_by_one_instance_is_served_by_the_others() -> None:
    """It serves again when it can load."""
    servers = [FakeServer(), FakeServer()]
    instances = await serving(servers)
    servers[0].blind = True
    await instances.update_weights(WeightVersion(name="2"))
    for name in ("a", "b", "c"):
        (result,) = await instances.submit(request(name))
        assert result.versions == ("2",)
    assert servers[0].served == []
    servers[0].blind = False
    await asyncio.sleep(60.0)
    assert instances._instances[0].version == "2"
    servers[0].blind = servers[1].blind = True
    with pytest.raises(UsageError, match="no such folder"):
        await instances.update_weights(WeightVersion(name="3"))
    await instances.close()


@in_virtual_time
async def test_start_waits_for_servers_that_come_later() -> None:
    server = FakeServer()
    server.refusing = RunFailedError("connection refused")
    instances = instances_of([server], wait_s=300.0)
    start = asyncio.ensure_future(instances.start())
    await asyncio.sleep(120.0)
    assert not start.done()
    server.refusing = None
    await start
    await instances.close()


@in_virtual_time
async def test_request_that_fails_on_every_instance_fails() -> None:
    """After each failure, the instance must pass a health check before the next request."""
    server = FakeServer()
    instances = await serving([server])
    server.failing = RunFailedError("internal error")
    with pytest.raises(RunFailedError, match="internal error"):
        await instances.submit(request("r"))
    assert len(server.served) == MOST_ATTEMPTS
    server.failing = UsageError("prompt too long")
    with pytest.raises(UsageError, match="prompt too long"):
        await instances.submit(request("r"))
    assert len(server.served) == MOST_ATTEMPTS + 1
    await instances.close()


@in_virtual_time
async def test_requests_wait_a_limited_time_for_an_instance() -> None:
    server = FakeServer()
    instances = await serving([server], wait_s=100.0)
    server.state = "dead"
    begin = asyncio.get_running_loop().time()
    message = "all instances were unusable for 100 s: server 0: connection refused"
    with pytest.raises(RunFailedError, match=message):
        await instances.submit(request("r"))
    assert 99 <= asyncio.get_running_loop().time() - begin <= 130
    with pytest.raises(RunFailedError, match="server 0: connection refused"):
        await instances.health()
    await instances.close()


@pytest.mark.parametrize("kind", [UsageError, RunFailedError])
@in_virtual_time
async def test_failed_start_reports_the_reason(kind: type[SlurmrlError]) -> None:
    """The engine does not wait for an unusable server, even if another one works."""
    servers = [FakeServer(), FakeServer()]
    servers[1].refusing = kind("wrong flags")
    if kind is RunFailedError:
        servers[0].refusing = kind("wrong flags")
    instances = instances_of(servers, wait_s=5.0)
    with pytest.raises(kind, match="wrong flags"):
        await instances.start()


@in_virtual_time
async def test_requests_go_to_the_instance_with_their_prefix_unless_it_is_busy() -> None:
    servers = [FakeServer(), FakeServer()]
    instances = await serving(servers)
    turn = (5,) * 64
    await instances.submit(request("first", turn))
    home = servers[0] if servers[0].served else servers[1]
    other = servers[1] if home is servers[0] else servers[0]
    for number in range(5):
        await instances.submit(request(f"filler{number}", (9, number) * 32))
        (result,) = await instances.submit(request(f"turn{number}", turn))
        turn += (*result.tokens, *(number,) * 40)
    assert {"turn0", "turn1", "turn2", "turn3", "turn4"} <= set(home.served)
    burst = [instances.submit(request(f"burst{number}", turn)) for number in range(4)]
    await asyncio.gather(*burst)
    assert {name for name in other.served if name.startswith("burst")}
    await instances.close()


@in_virtual_time
async def test_urgent_requests_are_sent_first() -> None:
    server = FakeServer()
    instances = await serving([server])
    futures = []
    for number, priority in enumerate([0] * 6 + [2, 1, 0, -1]):
        each = request(f"r{number}")
        futures.append(instances.submit(GenerationRequest(**{**vars(each), "priority": priority})))
    await asyncio.gather(*futures)
    assert server.served[6:] == ["r9", "r8", "r7", "r6"]
    await instances.close()


def test_prefixes_match_in_whole_blocks_and_expire() -> None:
    index = PrefixIndex(most_blocks=4)
    index.remember(range(3 * BLOCK + 5), 0)
    index.remember(range(BLOCK), 1)
    assert index.matches(range(100)) == {0: 3 * BLOCK, 1: BLOCK}
    assert index.matches((9, *range(1, 100))) == {}
    index.forget(0)
    assert index.matches(range(100)) == {1: BLOCK}
    index.remember(range(1000, 1000 + 4 * BLOCK), 2)
    assert index.matches(range(100)) == {}


def test_request_can_be_aborted_from_another_thread_at_once() -> None:
    server = FakeServer()
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def aborted() -> tuple[Completion, ...]:
        inner = FakeEngine(server)
        inner._version = "1.0"
        engine = DistantEngine(inner, loop, "a")
        future = engine.submit(request("x", (1,), keys=2))
        engine.abort("x")
        return await future

    try:
        assert asyncio.run(asyncio.wait_for(aborted(), 60)) == (ABORTED, ABORTED)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
