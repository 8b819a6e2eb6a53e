"""A server that the run starts and restarts, with a program in place of the server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.rollouts.generation import server_instance
from slurmrl.rollouts.generation.base import ABORTED, WeightVersion
from slurmrl.rollouts.generation.instances import Instances
from slurmrl.rollouts.generation.process import ServerProgram
from slurmrl.rollouts.generation.server_client import ServerClient
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.run.events import EventWriter, read_all
from slurmrl.run.paths import RunPaths
from tests.unit.engines.test_engines_rollout_server_client import (
    ScriptedDialect,
    completion,
    request,
)

DEADLINE_S = 60.0
SERVER = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_instance, "PAUSE_S", (0.05, 0.05))
    monkeypatch.setattr(server_instance, "PROBE_S", 0.02)
    monkeypatch.setattr(server_instance, "FAREWELL_S", 0.05)


async def started(folder: Path, count: int) -> list[int]:
    """Wait for this many starts of the server, and return their pids. (Every test has a deadline.)
    The engine may count a server as ready before its program runs.
    """
    record = folder / "starts"
    while not record.exists() or len(pids := record.read_text().split()) < count:
        await asyncio.sleep(0.02)
    return list(map(int, pids))


async def ended(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.02)


class PickyDialect(ScriptedDialect):
    """A dialect that rejects the versions in ``refused`` while the server is paused."""

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
        self.answers = True
        self.slow_s = 0.0
        """How long each answer to a probe takes."""

    async def connect(self) -> int:
        return self.contexts.pop(0) if self.contexts else await super().connect()

    async def health(self) -> None:
        await super().health()
        await asyncio.sleep(self.slow_s)
        if not self.answers:
            raise RunFailedError("no answer")

    async def load(self, version: WeightVersion) -> None:
        await super().load(version)
        if self.hanging is not None and Path(f"/proc/{self.hanging}").exists():
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

    async def answer(self, name: str = "r-0-0", version: str = "1.1") -> None:
        """Wait for a request, and complete it."""
        while name not in self.draws:
            await asyncio.sleep(0.01)
        self.draws[name].set_result(replace(completion(), versions=(version,) * 3))


def within(
    folder: Path,
    test: Callable[[Instances, PickyDialect], Awaitable[None]],
    patience: Patience = Patience(),  # noqa: B008 - it is frozen
    *,
    context: int = 0,
    code: str = SERVER,
    events: EventWriter | None = None,
    made: Callable[[], PickyDialect] = PickyDialect,
) -> None:
    """Run ``test`` with the engine of a server at version 1.1, and with its dialect."""

    async def main() -> None:
        dialect = made()
        program = ServerProgram(
            name="server 0",
            command=[sys.executable, "-c", code, str(folder / "starts")],
            environment=os.environ,
            log=folder / "server.log",
            events=events,
        )

        async def connect() -> ServerClient:
            while not dialect.answers:
                await asyncio.sleep(0.02)
            return await ServerClient.connect(dialect, least=context)

        engine = Instances({"server 0": connect}, patience, program=program)
        try:
            await engine.start()
            await engine.update_weights(WeightVersion(name="1.1"))
            await test(engine, dialect)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


async def never(engine: Instances, dialect: PickyDialect) -> None:
    raise AssertionError("it serves")


def test_killed_server_restarts_and_repeats_its_request(tmp_path: Path) -> None:
    """The next start gets the weights first, and an event says why the first one ended."""
    paths = RunPaths(tmp_path / "run")
    paths.events.mkdir(parents=True)

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        future = engine.submit(request())
        (first,) = await started(tmp_path, 1)
        while "r-0-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        dialect.calls.clear()
        os.kill(first, signal.SIGKILL)
        await started(tmp_path, 2)
        while "draw r-0-0" not in dialect.calls:
            await asyncio.sleep(0.01)
        await dialect.answer()
        assert len(await future) == 1
        acts = [call for call in dialect.calls if call != "health"]
        assert acts == ["pause", "load 1.1", "resume", "draw r-0-0"]

    within(tmp_path, test, events=EventWriter(paths, "sglang.rollout.0.0"))
    (told,) = read_all(paths)
    assert (told["kind"], told["server"], told["again"]) == ("server_ended", "server 0", True)
    assert told["reason"].startswith("server 0 ended (SIGKILL)")


def test_rejected_version_leaves_the_previous_version_in_service(tmp_path: Path) -> None:
    """The rejected load may have replaced some tensors."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        dialect.refused = {"2.1"}
        dialect.calls.clear()
        with pytest.raises(UsageError, match="shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        assert engine.version == "1.1"
        answer = engine.submit(request())
        await dialect.answer()
        assert await answer == (completion(),)
        calls = [call for call in dialect.calls if call != "health"]
        assert calls == ["pause", "load 2.1", "pause", "load 1.1", "resume", "draw r-0-0"]
        assert len(await started(tmp_path, 1)) == 1

    within(tmp_path, test)


def test_server_with_too_little_memory_for_a_sequence_is_rejected(tmp_path: Path) -> None:
    """The server would truncate completions without a sign."""
    message = r"server 0 cannot be used: .*accepts at most 16 tokens .* this run may need 17"
    with pytest.raises(UsageError, match=message):
        within(tmp_path, never, context=17)


@pytest.mark.parametrize("lacks", ["memory", "weights"])
def test_server_starts_again_after_an_unusable_restart(tmp_path: Path, lacks: str) -> None:
    """Other programs may use memory of its GPU for a while. The next start serves requests."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        if lacks == "memory":
            dialect.contexts = [15]
        else:
            dialect.refused = {"1.1"}
        (first,) = await started(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        while dialect.contexts or (dialect.refused and dialect.calls.count("load 1.1") < 2):
            await asyncio.sleep(0.01)
        dialect.refused.clear()
        answer = engine.submit(request())
        await dialect.answer()
        assert len(await answer) == 1
        assert dialect.calls.count("load 1.1") == (2 if lacks == "memory" else 3)

    within(tmp_path, test, context=16)


def test_server_that_rejects_its_earlier_version_is_abandoned(tmp_path: Path) -> None:
    """Requests fail instead of waiting without end for weights that never come."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        dialect.refused = {"1.1", "2.1"}
        with pytest.raises(UsageError, match=r"2\.1: the shapes do not match"):
            await engine.update_weights(WeightVersion(name="2.1"))
        for name in ("waits", "comes later"):
            with pytest.raises(RunFailedError, match=r"failed 3 times in a row: 1\.1: the shapes"):
                await engine.submit(request(name))

    within(tmp_path, test)


def test_server_that_hangs_during_an_update_is_restarted(tmp_path: Path) -> None:
    """Until the time of a start has passed, silence does not count."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        (pid,) = await started(tmp_path, 1)
        dialect.hanging = pid
        began = time.monotonic()
        await engine.update_weights(WeightVersion(name="2.1"))
        assert time.monotonic() - began >= 2.0
        assert engine.version == "2.1"
        await ended(pid)
        assert len(await started(tmp_path, 2)) == 2
        assert dialect.calls.count("load 2.1") == 2

    within(tmp_path, test, Patience(start_s=2.0, silence_s=0.3, probe_s=0.1))


def test_unresponsive_server_is_ended_unless_it_answers_requests(tmp_path: Path) -> None:
    """A server that is too busy to answer probes but answers requests is kept."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        (pid,) = await started(tmp_path, 1)
        answers = [engine.submit(request(f"r{number}")) for number in range(12)]
        dialect.answers = False
        for number, answer in enumerate(answers):
            await asyncio.sleep(0.1)
            await dialect.answer(f"r{number}-{number}-0")
            await answer
        assert Path(f"/proc/{pid}").exists()
        await ended(pid)
        dialect.answers = True
        assert len(await started(tmp_path, 2)) == 2

    within(tmp_path, test, Patience(silence_s=0.5, probe_s=0.02))


def test_suspended_process_does_not_mistake_its_server_for_hung(tmp_path: Path) -> None:
    """Silence is counted only while the process listens, so a suspended job keeps its servers."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        (pid,) = await started(tmp_path, 1)
        dialect.slow_s = 0.1
        for _ in range(3):
            time.sleep(1.0)  # blocks the event loop
            await asyncio.sleep(0.3)
        assert await started(tmp_path, 1) == [pid]
        assert Path(f"/proc/{pid}").exists()

    within(tmp_path, test, Patience(silence_s=0.5, probe_s=0.02))


@pytest.mark.parametrize(
    ("error", "lost", "message"),
    [
        ("ValueError(f'{sys.argv[0]} needs 3 heads')", UsageError, "with the same error"),
        ("FileNotFoundError('the tokenizer')", RunFailedError, "failed 3 times in a row"),
        (
            "RuntimeError('CUDA error: uncorrectable ECC error encountered')",
            RunFailedError,
            "failed 3 times in a row",
        ),
    ],
    ids=["the same anywhere", "of the host", "of the GPU"],
)
def test_repeated_start_error_is_final_unless_the_host_may_be_faulty(
    tmp_path: Path, error: str, lost: type[Exception], message: str
) -> None:
    code = f"import sys, time\ntime.sleep(0.2)\nraise {error}"
    words = rf"{message}.*exited with code 1\): \w+Error: .*; its log is .*server.l"

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        await engine.submit(request())

    with pytest.raises(lost, match=words):
        within(tmp_path, test, code=code)
    assert (tmp_path / "server.log").read_text().count("Traceback") == 3


def test_error_that_servers_answer_before_ending_is_final_if_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers requests with status 500 while its engine has failed already."""
    monkeypatch.setattr(server_instance, "FAREWELL_S", DEADLINE_S)
    code = "import time\ntime.sleep(0.4)\nraise RuntimeError('no kernel for heads of 16')"

    class Failing(PickyDialect):
        async def connect(self) -> int:
            raise RunFailedError("HTTP status 500")

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        await engine.submit(request())

    with pytest.raises(UsageError, match=r"with the same error.*no kernel for heads of 16"):
        within(tmp_path, test, code=code, made=Failing)
    assert (tmp_path / "server.log").read_text().count("Traceback") == 3


def test_server_that_a_request_crashes_is_not_restarted_forever(tmp_path: Path) -> None:
    """A start that answers none of its requests has failed, although every start counts as stable
    immediately in this test. The second start answers, so four more starts follow it.
    """

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        answer = engine.submit(request())
        draw = None
        for count in range(1, 5):
            pid = (await started(tmp_path, count))[-1]
            while dialect.draws.get("r-0-0") in (None, draw):
                await asyncio.sleep(0.01)
            draw = dialect.draws["r-0-0"]
            if count == 2:
                other = engine.submit(request("other"))
                await dialect.answer("other-1-0")
                await other
            warden = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(pid, signal.SIGKILL)
            await ended(warden)
        with pytest.raises(RunFailedError, match=r"failed 3 times in a row: .*SIGKILL"):
            await answer

    within(tmp_path, test, Patience(stable_s=0.0))


def test_abort_ends_a_request_even_without_a_running_server(tmp_path: Path) -> None:
    async def test(engine: Instances, dialect: PickyDialect) -> None:
        first = engine.submit(request("first"))
        while "first-0-0" not in dialect.draws:
            await asyncio.sleep(0.01)
        engine.abort("first")
        engine.abort("unknown")
        assert await first == (completion("aborted", 2),)
        (pid,) = await started(tmp_path, 1)
        dialect.answers = False
        os.kill(pid, signal.SIGKILL)
        await ended(pid)
        await asyncio.sleep(0.1)
        with pytest.raises(RunFailedError, match="no instance can be used"):
            await engine.health()
        late = engine.submit(request("late", keys=2))
        engine.abort("late")
        assert await late == (ABORTED, ABORTED)

    within(tmp_path, test)


def test_server_that_ends_asleep_is_restarted_for_the_next_weights(tmp_path: Path) -> None:
    """Another start would take the GPU memory in which other models compute."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
        await engine.sleep()
        (first,) = await started(tmp_path, 1)
        os.kill(first, signal.SIGKILL)
        await ended(first)
        await engine.sleep()
        await asyncio.sleep(0.5)  # a start would follow after a tenth of that
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


def test_server_that_does_not_free_its_memory_is_ended(tmp_path: Path) -> None:
    """The memory is free when the call returns. A server that refuses to sleep never will."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
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
def test_server_that_does_not_wake_is_restarted(tmp_path: Path, dies: bool) -> None:
    """The server may still answer probes, or may have ended. The next start gets the weights."""

    async def test(engine: Instances, dialect: PickyDialect) -> None:
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
        await dialect.answer(version="2.1")
        assert len(await answer) == 1

    within(tmp_path, test)
