"""The worker's main loop: answers, error reports, exit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from slurmrl.errors import DamagedCheckpointError, EnvironmentFailure, RewardError
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.reports import Failure, Identity, RankId
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.messages import (
    FROM_WORKER,
    TO_ROLLOUT_WORKER,
    TO_WORKER,
    Answer,
    Done,
    Exit,
    LoadBatch,
    Order,
    Pulse,
    Ready,
    Retire,
    RunCall,
    Save,
    Saved,
    Serve,
    Start,
    StartRollout,
)
from slurmrl.workers.worker import orders as serve_module

START = TO_WORKER.to_json(Start(world_size=4))
READY = Ready(rank=3, size=40, fingerprint="f")


class LeftError(BaseException):
    """Raised in place of os._exit."""


def done(seq: int, **more: Any) -> Done:
    return Done(rank=3, seq=seq, seconds=1.0, **more)


class FakeExecutor:
    def __init__(self) -> None:
        self.raises: dict[str, BaseException] = {}
        self.closed = False

    def ready(self) -> Ready:
        return READY

    def execute(self, order: Order, say: Callable[[Saved], None]) -> Done:
        match order:
            case LoadBatch():
                return done(order.seq, tokens=len(order.items))
            case RunCall() if order.name in self.raises:
                raise self.raises[order.name]
            case RunCall():
                return done(order.seq, texts=({"called": order.name},))
        say(Saved(rank=3, seq=order.seq))
        return done(order.seq)

    def close(self) -> None:
        self.closed = True


class Rank:
    """The function ``serve`` of rank 3 in a thread, and the agent's end of its pipe."""

    def __init__(self, world: str = "trainer") -> None:
        self.world = world
        self.agent, self.pipe = Connection.pair()
        self.executor = FakeExecutor()
        self.code: int | None = None
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            self.code = serve_module.serve(
                Path("run"), RankId(self.world, 3), self.pipe, Activity()
            )
        except LeftError as left:
            self.code = left.args[0]
        self.pipe.close()  # as the end of the process would

    def order(self, order: Order) -> None:
        self.agent.send(TO_WORKER.to_json(order))

    def hear(self) -> Answer | Failure | Pulse:
        values = self.agent.receive(60)
        assert values is not None
        return FROM_WORKER.from_json(values)

    def failure(self) -> Failure:
        said = self.hear()
        assert isinstance(said, Failure)
        return said

    def end(self) -> int | None:
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    found = Rank()

    def leave(code: int) -> NoReturn:
        raise LeftError(code)

    monkeypatch.setattr(serve_module.os, "_exit", leave)
    monkeypatch.setattr(serve_module, "build", lambda *arguments: found.executor)
    found.thread.start()
    yield found
    found.agent.close()
    found.end()


@pytest.fixture
def ready(rank: Rank) -> Rank:
    rank.agent.send(START)
    assert rank.hear() == READY
    return rank


def test_messages_are_answered_in_order(ready: Rank) -> None:
    ready.order(LoadBatch(seq=0, step=1, items=((0, 1), (0, 2))))
    ready.order(RunCall(seq=1, step=1, name="gen", scalars={}))
    ready.order(Save(seq=2, step=1, directory="d"))
    assert [ready.hear() for _ in range(4)] == [
        done(0, tokens=2),
        done(1, texts=({"called": "gen"},)),
        Saved(rank=3, seq=2),
        done(2),
    ]


def test_worker_closes_its_executor_on_exit(ready: Rank) -> None:
    ready.order(Exit())
    assert ready.end() == 0
    assert ready.executor.closed


def test_worker_exits_if_the_agent_exits_before_the_start(rank: Rank) -> None:
    rank.agent.close()
    assert rank.end() == 1


def test_worker_exits_if_the_agent_exits_later(ready: Rank) -> None:
    ready.agent.close()
    assert ready.end() == 1
    assert not ready.executor.closed, "other ranks may be gone: no clean-up waits for them"


@pytest.mark.parametrize("error", [KeyError("id-7"), SystemExit(0)])
def test_error_is_reported_and_the_rank_keeps_running(ready: Rank, error: BaseException) -> None:
    """User code that calls sys.exit(0) must not look like a rank that was told to exit. While the
    failed rank stays, no other rank fails because of its end.
    """
    ready.executor.raises["reward_inf"] = error
    ready.order(RunCall(seq=5, step=9, name="reward_inf", scalars={}))
    said = ready.failure()
    assert "test_workers_worker_serve.py" in said.traceback
    assert replace(said, traceback="") == Failure(
        cause="exception",
        reason=f"rank 3: {type(error).__name__}: {error}",
        rank=3,
        step=9,
        call="reward_inf",
        exception=f"{type(error).__name__}: {error}",
    )
    assert ready.thread.is_alive()
    ready.agent.close()
    assert ready.end() == 1


def test_user_error_is_final(ready: Rank) -> None:
    ready.executor.raises["reward_inf"] = RewardError("reward m:f returned nan")
    ready.order(RunCall(seq=5, step=9, name="reward_inf", scalars={}))
    said = ready.failure()
    assert said.final
    assert (said.exception, said.traceback) == ("reward m:f returned nan", "")


def test_missing_host_feature_at_the_start_is_a_host_failure(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: object) -> NoReturn:
        raise EnvironmentFailure("/models/m is not on n1")

    monkeypatch.setattr(serve_module, "build", build)
    rank.agent.send(START)
    said = rank.failure()
    assert (said.cause, said.final) == ("environment", False)


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection refused",
        "timed out waiting 1800 s for 0//cpu//0/1 in /runs/me/sft/1/control/00000001.meeting",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error",
    ],
)
def test_failed_connection_at_the_start_is_an_environment_failure(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def build(*arguments: object) -> NoReturn:
        raise RuntimeError(text)

    monkeypatch.setattr(serve_module, "build", build)
    rank.agent.send(START)
    said = rank.failure()
    assert (said.cause, said.echo, said.final) == ("environment", True, False)


def test_damaged_checkpoint_is_named(ready: Rank) -> None:
    error = DamagedCheckpointError("step-7.2: actor.0 has another checksum", "step-7.2")
    ready.executor.raises["gen"] = error
    ready.order(RunCall(seq=5, step=9, name="gen", scalars={}))
    assert ready.failure().damaged == "step-7.2"


def test_long_errors_are_truncated(ready: Rank) -> None:
    ready.executor.raises["gen"] = ValueError("x" * 3_000_000)
    ready.order(RunCall(seq=5, step=9, name="gen", scalars={}))
    said = ready.failure()
    assert said.exception.startswith("ValueError: xxx")
    assert len(said.exception) + len(said.traceback) < 100_000


def test_slow_agent_receives_the_complete_last_message(rank: Rank) -> None:
    """More output than a pipe buffer is queued before the last message."""
    large = replace(READY, fingerprint="x" * 2_000_000)
    rank.executor.ready = lambda: large  # type: ignore[method-assign]
    rank.executor.raises["gen"] = ValueError("bad")
    rank.agent.send(START)
    rank.order(RunCall(seq=5, step=9, name="gen", scalars={}))
    assert rank.hear() == large
    assert rank.failure().exception == "ValueError: bad"


def test_failed_rank_exits_if_the_agent_does_not_end_it(
    ready: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "LINGER_S", 0.05)
    ready.executor.raises["gen"] = ValueError("bad")
    ready.order(RunCall(seq=5, step=9, name="gen", scalars={}))
    assert ready.end() == 1
    assert ready.failure().exception == "ValueError: bad"


def test_failed_start_is_reported(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> FakeExecutor:
        raise OSError("no such file")

    broken: Callable[..., FakeExecutor] = fail
    monkeypatch.setattr(serve_module, "build", broken)
    rank.agent.send(START)
    said = rank.failure()
    assert (said.call, said.step) == ("start", None)
    assert said.exception == "OSError: no such file"


class FakeRolloutWorker:
    """A worker that reads one message, and retires, or fails when it is told to serve."""

    def ready(self) -> Ready:
        return READY

    def serve(self, agent: Connection) -> None:
        values = agent.receive(60)
        assert values is not None
        message = TO_ROLLOUT_WORKER.from_json(values)
        if isinstance(message, Serve):
            raise RuntimeError("the engine broke")


@pytest.mark.parametrize(
    ("message", "code"), [(Retire(reason="orphan", within_s=1.0), 0), (Serve(incarnation=1), 1)]
)
def test_rollout_task_is_served_until_its_worker_returns(
    monkeypatch: pytest.MonkeyPatch, message: Serve | Retire, code: int
) -> None:
    def leave(code: int) -> NoReturn:
        raise LeftError(code)

    monkeypatch.setattr(serve_module.os, "_exit", leave)
    monkeypatch.setattr(serve_module, "build_rollout", lambda *arguments: FakeRolloutWorker())
    rank = Rank("rollout/3")
    rank.thread.start()
    task = Identity("rollout", 3, 0, "r3", "50.0.0", "50_3", 7)
    start = StartRollout(world_size=1, agent=task)
    rank.agent.send(TO_ROLLOUT_WORKER.to_json(start))
    assert rank.hear() == READY
    rank.agent.send(TO_ROLLOUT_WORKER.to_json(message))
    if code:
        failure = rank.failure()
        assert (failure.world, failure.call) == ("rollout/3", "rollout")
    rank.agent.close()
    assert rank.end() == code
