"""The engine of a server, with a server that computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest

from slurmrl.errors import RunFailedError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.dialect import Dialect
from slurmrl.rollouts.generation.server_client import ServerClient

CONTEXT = 16


class ScriptedDialect(Dialect):
    """A dialect whose requests wait until the test ends them. The first ``deaf`` aborts of a
    request are lost, like aborts that arrive before their request.
    """

    where = "server"

    def __init__(self, *, deaf: int = 0) -> None:
        self.held = "none"
        self.draws: dict[str, asyncio.Future[Completion]] = {}
        self.seeds: dict[str, int] = {}
        self.calls: list[str] = []
        self.most = 0
        self._deaf = deaf

    async def connect(self) -> int:
        return CONTEXT

    async def sample(self, draw: GenerationRequest) -> Completion:
        self.calls.append(f"draw {draw.request_id}")
        self.seeds[draw.request_id] = draw.server_seed
        self.draws[draw.request_id] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.draws))
        try:
            return await self.draws[draw.request_id]
        finally:
            del self.draws[draw.request_id]

    async def abort(self, name: str) -> None:
        self.calls.append(f"abort {name}")
        self._deaf -= 1
        if self._deaf < 0 and name in self.draws and not self.draws[name].done():
            self.draws[name].set_result(completion("aborted", 2))

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def load(self, version: WeightVersion) -> None:
        self.calls.append(f"load {version.name}")
        if version.name == "broken":
            raise RunFailedError("no such weights")
        self.held = version.name

    async def version(self) -> str:
        return self.held

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")

    async def health(self) -> None:
        self.calls.append("health")

    async def close(self) -> None:
        for future in self.draws.values():
            future.cancel()


def completion(finish: Any = "stop", tokens: int = 3) -> Completion:
    return Completion(
        tokens=(7,) * tokens, logprobs=(-1.0,) * tokens, versions=("1.1",) * tokens, finish=finish
    )


def request(name: str = "r", keys: int = 1, prompt: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt=(1,) * prompt,
        keys=tuple(range(keys)),
        seed=1,
        step=2,
        options=GenerationOptions(max_new_tokens=8),
    )


def within_a_minute(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*arguments, **named), 60)

        asyncio.run(bounded())

    return run


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ready(dialect: ScriptedDialect, **options: int) -> ServerClient:
    engine = await ServerClient.connect(dialect, **options)
    await engine.update_weights(WeightVersion(name="1.1"))
    dialect.calls.clear()
    return engine


@within_a_minute
async def test_tokens_of_unknown_weights_are_rejected() -> None:
    """`health` then fails, so that the server gets the weights again."""
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    future = engine.submit(request())
    await settle()
    made = replace(completion(), versions=("1.1", "default", "default"))
    dialect.draws["r-0-0"].set_result(made)
    with pytest.raises(RunFailedError, match=r"sampled with weights default.* not installed"):
        await future
    await engine.health()
    dialect.held = "default"
    with pytest.raises(RunFailedError, match=r"holds version default instead of 1\.1"):
        await engine.health()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@within_a_minute
async def test_tokens_without_a_probability_are_rejected(value: float) -> None:
    """With such tokens, training would skip every step."""
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    future = engine.submit(request())
    await settle()
    dialect.draws["r-0-0"].set_result(replace(completion(), logprobs=(-1.0, value, -1.0)))
    with pytest.raises(RunFailedError, match=r"not finite numbers; have the weights diverged"):
        await future


@within_a_minute
async def test_sleeping_server_wakes_before_it_gets_weights() -> None:
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    await engine.sleep()
    assert engine.version is None
    dialect.held = "lost"
    await engine.health()
    future = engine.submit(request())
    await settle()
    assert dialect.draws == {}
    await engine.update_weights(WeightVersion(name="2.1"))
    await engine.update_weights(WeightVersion(name="3.1"))
    loads = ["pause", "load 2.1", "resume", "pause", "load 3.1", "resume"]
    calls = [call for call in dialect.calls if not call.startswith("draw")]
    assert calls == ["sleep", "health", "wake", *loads]
    await settle()
    dialect.draws["r-0-0"].set_result(replace(completion(), versions=("3.1",) * 3))
    await future


@within_a_minute
async def test_requests_wait_for_the_first_version_and_are_limited_in_number() -> None:
    dialect = ScriptedDialect()
    engine = await ServerClient.connect(dialect, concurrency=5)
    futures = [engine.submit(request(f"r{index}", keys=4)) for index in range(10)]
    await settle()
    assert (dialect.calls, engine.version) == ([], None)
    await engine.update_weights(WeightVersion(name="1.1"))
    tokens: dict[str, int] = {}
    while not all(future.done() for future in futures):
        await settle()
        name, future = list(dialect.draws.items())[-1]
        tokens[name] = len(tokens) + 1
        future.set_result(completion(tokens=tokens[name]))
        await settle()
    assert dialect.most == 5
    for index, future in enumerate(futures):
        expected = [tokens[f"r{index}-{index}-{key}"] for key in range(4)]
        assert [len(result.tokens) for result in future.result()] == expected
    assert len(set(dialect.seeds.values())) == 4  # each key has a separate random stream
    assert all(0 <= seed < 2**63 for seed in dialect.seeds.values())


@within_a_minute
async def test_abort_returns_sampled_tokens_even_if_it_overtakes_the_request() -> None:
    dialect = ScriptedDialect(deaf=3)
    engine = await ready(dialect, concurrency=2)
    future = engine.submit(request(keys=4))
    await settle()
    dialect.draws["r-0-0"].set_result(completion("stop"))
    engine.abort("r")
    engine.abort("r")
    engine.abort("unknown")
    results = await future
    assert [result.finish for result in results] == ["stop", "aborted", "aborted", "aborted"]
    assert [len(result.tokens) for result in results] == [3, 2, 0, 0]
    assert "draw r-0-3" not in dialect.calls  # it was aborted before it was sent


@within_a_minute
async def test_completion_aborted_by_the_server_is_an_error() -> None:
    """A server that shuts down returns partial completions, which must not count as complete."""
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    future = engine.submit(request())
    await settle()
    dialect.draws["r-0-0"].set_result(completion("aborted"))
    with pytest.raises(RunFailedError, match="aborted the request"):
        await future


@within_a_minute
async def test_paused_engine_stays_paused_after_an_update() -> None:
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    await engine.pause()
    await engine.update_weights(WeightVersion(name="2.1"))
    assert dialect.calls == ["pause", "pause", "load 2.1"]
    await engine.resume()
    await engine.update_weights(WeightVersion(name="3.1"))
    assert dialect.calls[3:] == ["resume", "pause", "load 3.1", "resume"]
    assert engine.version == "3.1"


@within_a_minute
async def test_no_request_is_sent_after_a_failed_update() -> None:
    """The server's weights may be a mixture."""
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    with pytest.raises(RunFailedError, match="no such weights"):
        await engine.update_weights(WeightVersion(name="broken"))
    future = engine.submit(request())
    await settle()
    assert engine.version is None
    assert "draw r-0-0" not in dialect.calls
    await engine.close()
    with pytest.raises(RunFailedError, match="closed"):
        await future
    with pytest.raises(RunFailedError, match="closed"):
        await engine.submit(request())


@within_a_minute
async def test_cancelled_future_ends_its_requests() -> None:
    dialect = ScriptedDialect()
    engine = await ready(dialect)
    future = engine.submit(request(keys=2))
    await settle()
    assert len(dialect.draws) == 2
    future.cancel()
    await settle()
    assert dialect.draws == {}
    engine.submit(request()).cancel()  # its name can be reused
