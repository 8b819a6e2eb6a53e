"""The engine of a server that is started again, in front of a program that is no server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurmrl.config.schema.rollout import Address
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.generation.base import ABORTED, WeightVersion
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.managed_server import ManagedServer
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.server_supervisor import Patience
from tests.unit.engines.test_engines_rollout_server_client import (
    ScriptedDialect,
    completion,
    request,
)

DEADLINE_S = 60.0
SERVER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"


async def started(folder: Path, count: int) -> list[int]:
    """The pids of all starts of the server, once there are that many.

    (Every test has a deadline.) A server is ready here before it runs.
    """
    record = folder / "starts"
    while not record.exists() or len(pids := record.read_text().split()) < count:
        await asyncio.sleep(0.02)
    return list(map(int, pids))


async def ended(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.02)


class PickyDialect(ScriptedDialect):
    """Refuses the versions in ``refused`` once it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts: list[int] = []
        """Of the next starts."""
        self.refused: set[str] = set()
        self.restless: SlurmrlError | None = None
        """Raised by `sleep`."""
        self.at_wake: Callable[[], None] = lambda: None
        self.hanging: int | None = None
        """The pid of a start that hangs when it is to load a version."""
        self._hangs = False

    async def connect(self) -> int:
        return self.contexts.pop(0) if self.contexts else await super().connect()

    async def health(self) -> None:
        await super().health()
        if self._hangs and Path(f"/proc/{self.hanging}").exists():
            raise RunFailedError("no answer")

    async def load(self, version: WeightVersion) -> None:
        await super().load(version)
        if self.hanging is not None and not self._hangs:
            self._hangs = True
            await asyncio.Event().wait()
        if version.name in self.refused:
            raise UsageError(f"{version.name}: the shapes do not match")

    async def sleep(self) -> None:
        await super().sleep()
        if self.restless is not None:
            raise self.restless

    async def wake(self) -> None:
        await super().wake()
        self.at_wake()


def within(
    folder: Path,
    test: Callable[[ManagedServer, PickyDialect], Awaitable[None]],
    patience: Patience = Patience(),  # noqa: B008 - it is frozen
    context: int = 0,
) -> None:
    """``test`` gets the engine of a server with version 1.1, and how that server is spoken to."""

    async def main() -> None:
        dialect = PickyDialect()
        program = ServerProgram(
            name="server 0",
            command=[sys.executable, "-c", SERVER, str(folder / "starts")],
            environment=os.environ,
            log=folder / "server.log",
        )

        def speak(client: HttpClient) -> PickyDialect:
            return dialect

        address = Address(f"unix:{folder / 'none.sock'}")
        engine = ManagedServer(program, address, speak, patience=patience, context=context)
        try:
            await engine.update_weights(WeightVersion(name="1.1"))
            await test(engine, dialect)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_refused_version_leaves_the_one_before_in_service(tmp_path: Path) -> None:
    """The refused load may have replaced some tensors, so the earlier version is loaded again
    before the server resumes and requests are answered.
    """

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        dialect.refused = {"2.1"}
        dialect.calls.clear()
        with pytest.raises(UsageError, match="shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        assert engine.version == "1.1"
        calls = [call for call in dialect.calls if call != "health"]
        assert calls == ["pause", "load 2.1", "pause", "load 1.1", "resume"]
        answer = engine.submit(request())
        while "r-0-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        dialect.draws["r-0-0"].set_result(completion())
        assert await answer == (completion(),)

    within(tmp_path, test)


def test_a_server_with_less_memory_than_a_sequence_needs_is_refused(tmp_path: Path) -> None:
    """It would cut completions short, which would look like long ones."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        raise AssertionError("it serves")

    with pytest.raises(UsageError, match=r"takes 16 tokens .* this run may have 17"):
        within(tmp_path, test, context=17)


def test_a_later_start_with_less_memory_is_not_the_last(tmp_path: Path) -> None:
    """Others may hold memory of its GPU for a while. The next start has enough, and serves."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        dialect.contexts = [15]
        (first,) = await started(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        while dialect.contexts:
            await asyncio.sleep(0.01)
        await engine.health()
        assert dialect.calls.count("load 1.1") == 2

    within(tmp_path, test, context=16)


def test_a_server_that_hangs_while_it_takes_weights_is_started_again(tmp_path: Path) -> None:
    """Once that has taken as long as a start may take."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        (pid,) = await started(tmp_path, 1)
        dialect.hanging = pid
        await engine.update_weights(WeightVersion(name="2.1"))
        assert engine.version == "2.1"
        await ended(pid)
        assert len(await started(tmp_path, 2)) == 2
        assert dialect.calls.count("load 2.1") == 2

    within(tmp_path, test, Patience(start_s=3.0, silence_s=1.0, probe_s=0.1))


def test_a_start_that_does_not_take_the_weights_is_not_the_last(tmp_path: Path) -> None:
    """Servers answer status 400 also for a full disk or memory, so a start that fails to load what
    an earlier one has held counts as one failed start.
    """

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        dialect.refused = {"1.1"}
        with pytest.raises(RunFailedError, match="the shapes do not match"):
            await engine._prepare()

    within(tmp_path, test)


def test_a_server_that_dies_of_a_request_is_not_started_for_ever(tmp_path: Path) -> None:
    """No start answers the request, so none is good, although each counts as stable at once."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        answer = engine.submit(request())
        draw = None
        for count in range(1, 4):
            pid = (await started(tmp_path, count))[-1]
            while dialect.draws.get("r-0-0") in (None, draw):
                await asyncio.sleep(0.01)
            draw = dialect.draws["r-0-0"]
            warden = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(pid, signal.SIGKILL)
            await ended(warden)
        assert draw is not None
        draw.set_exception(RunFailedError("the connection was closed"))
        with pytest.raises(RunFailedError, match=r"failed 3 times in a row: .*SIGKILL"):
            await answer

    within(tmp_path, test, Patience(stable_s=0.0))


def test_an_abort_ends_a_request_whether_the_server_runs_or_not(tmp_path: Path) -> None:
    """It gets what was drawn; of a start that has ended, nothing, without waiting for the next."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        first = engine.submit(request("first"))
        while "first-0-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        engine.abort("first")
        engine.abort("unknown")
        assert await first == (completion("aborted", 2),)
        (pid,) = await started(tmp_path, 1)
        os.kill(pid, signal.SIGKILL)
        await ended(pid)
        while engine._server._up is not None:
            await asyncio.sleep(0.01)
        late = engine.submit(request("late", keys=2))
        engine.abort("late")
        assert await late == (ABORTED, ABORTED)

    within(tmp_path, test)


def test_a_server_that_refuses_its_earlier_version_is_closed(tmp_path: Path) -> None:
    """Requests fail instead of waiting without end for weights that never come."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        dialect.refused = {"1.1", "2.1"}
        with pytest.raises(UsageError, match=r"1\.1: the shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        with pytest.raises(RuntimeError, match="server 0 was closed"):
            await engine.submit(request())

    within(tmp_path, test)


def test_a_server_that_ends_while_it_sleeps_is_started_for_the_next_weights(tmp_path: Path) -> None:
    """Another start would take the GPU memory in which other models compute."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        await engine.sleep()
        (first,) = await started(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        await ended(first)
        await engine.sleep()
        await asyncio.sleep(2.0)  # a start would follow after half a second
        assert await started(tmp_path, 1) == [first]
        await engine.pause()
        await engine.update_weights(WeightVersion(name="2.1"))
        assert engine.version == "2.1"
        assert len(await started(tmp_path, 2)) == 2
        calls = dialect.calls[dialect.calls.index("sleep") :]
        acts = [call for call in calls if call not in ("sleep", "health")]
        assert acts == ["pause", "load 2.1", "resume", "pause"]
        await engine.sleep()
        await engine.resume()
        await engine.update_weights(WeightVersion(name="3.1"))
        assert dialect.calls[-1] == "resume"

    within(tmp_path, test)


def test_a_server_that_does_not_free_its_memory_is_ended(tmp_path: Path) -> None:
    """The memory is free when the call returns. A server that refuses to sleep never will."""

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        dialect.restless = RunFailedError("no answer within 60 s")
        (first,) = await started(tmp_path, 1)
        await engine.sleep()
        assert not Path(f"/proc/{first}").exists()
        dialect.restless = None
        await engine.update_weights(WeightVersion(name="2.1"))
        assert len(await started(tmp_path, 2)) == 2
        await engine.sleep()
        assert Path(f"/proc/{(await started(tmp_path, 2))[-1]}").exists()
        await engine.update_weights(WeightVersion(name="3.1"))
        assert len(await started(tmp_path, 2)) == 2
        dialect.restless = UsageError("HTTP status 404")
        with pytest.raises(UsageError, match="404"):
            await engine.sleep()

    within(tmp_path, test)


@pytest.mark.parametrize("dies", [False, True])
def test_a_server_that_does_not_wake_is_started_again(tmp_path: Path, dies: bool) -> None:
    """It may answer probes all the same, or have ended because of it.

    The next start gets the weights, and requests are answered.
    """

    async def test(engine: ManagedServer, dialect: PickyDialect) -> None:
        await engine.sleep()
        (first,) = await started(tmp_path, 1)

        def fail() -> None:
            if dies:
                os.kill(first, signal.SIGKILL)
            raise RunFailedError("no answer within 60 s")

        dialect.at_wake = fail
        await engine.update_weights(WeightVersion(name="2.1"))
        assert not Path(f"/proc/{first}").exists()
        assert len(await started(tmp_path, 2)) == 2
        assert dialect.calls.count("wake") == 1
        assert engine.version == "2.1"
        answer = engine.submit(request())
        while "r-0-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        dialect.draws["r-0-0"].set_result(replace(completion(), versions=("2.1",) * 3))
        assert len(await answer) == 1

    within(tmp_path, test)
