"""The worker's main loop: answers, error reports, exit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from slurmrl.channel.pipe import Connection
from slurmrl.errors import DamagedCheckpointError, EnvironmentFailure, RewardError
from slurmrl.parallel.activity import Activity
from slurmrl.workers import messages
from slurmrl.workers.worker import serve as serve_module
from slurmrl.worlds import RankId

START = {"type": messages.START, "store": "127.0.0.1:1"}


class LeftError(BaseException):
    """Raised in place of os._exit."""


class FakeExecutor:
    def __init__(self) -> None:
        self.raises: dict[str, BaseException] = {}
        self.closed = False

    def describe_data(self) -> dict[str, Any]:
        return {"size": 40}

    def load(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": len(message["items"])}

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["name"] in self.raises:
            raise self.raises[message["name"]]
        return {"stats": {"called": message["name"]}}

    def save(self, message: dict[str, Any], say: Callable[[Any], None]) -> dict[str, Any]:
        say({"type": messages.SAVED, "rank": 3, "seq": message["seq"], "files": []})
        return {"tokens": 0}

    def close(self) -> None:
        self.closed = True


class Rank:
    """``serve`` of rank 3 in a thread, and the agent's end of its pipe."""

    def __init__(self) -> None:
        self.agent, self.pipe = Connection.pair()
        self.executor = FakeExecutor()
        self.code: int | None = None
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        try:
            self.code = serve_module.serve(Path("run"), RankId("trainer", 3), self.pipe, Activity())
        except LeftError as left:
            self.code = left.args[0]
        self.pipe.close()  # as the end of the process would

    def hear(self) -> dict[str, Any]:
        message = self.agent.receive(60)
        assert message is not None
        return message

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
    assert rank.hear() == {"type": messages.READY, "rank": 3, "size": 40}
    return rank


def test_messages_are_answered_in_order(ready: Rank) -> None:
    ready.agent.send({"type": messages.LOAD, "seq": 0, "items": [1, 2]})
    ready.agent.send({"type": messages.CALL, "seq": 1, "name": "gen", "step": 1})
    ready.agent.send({"type": messages.SAVE, "seq": 2, "directory": "d"})
    done = {"type": messages.DONE, "rank": 3}
    assert [ready.hear() for _ in range(4)] == [
        {**done, "seq": 0, "tokens": 2},
        {**done, "seq": 1, "stats": {"called": "gen"}},
        {"type": messages.SAVED, "rank": 3, "seq": 2, "files": []},
        {**done, "seq": 2, "tokens": 0},
    ]


def test_exit_closes_the_executor(ready: Rank) -> None:
    ready.agent.send({"type": messages.EXIT})
    assert ready.end() == 0
    assert ready.executor.closed


def test_agent_that_goes_before_the_start(rank: Rank) -> None:
    rank.agent.close()
    assert rank.end() == 1


def test_agent_that_goes_later(ready: Rank) -> None:
    ready.agent.close()
    assert ready.end() == 1
    assert not ready.executor.closed, "other ranks may be gone: no clean-up waits for them"


@pytest.mark.parametrize("error", [KeyError("id-7"), SystemExit(0)])
def test_error_is_described_and_the_rank_stays(ready: Rank, error: BaseException) -> None:
    """User code that calls sys.exit(0) must not look like a rank that was told to leave; and
    while a failed rank is there, no other one fails because it is gone."""
    ready.executor.raises["reward_inf"] = error
    ready.agent.send({"type": messages.CALL, "seq": 5, "name": "reward_inf", "step": 9})
    said = ready.hear()
    assert "test_workers_worker_serve.py" in said.pop("traceback")
    assert said == {
        "type": messages.ERROR,
        "cause": "exception",
        "reason": f"rank 3: {type(error).__name__}: {error}",
        "rank": 3,
        "step": 9,
        "call": "reward_inf",
        "exception": f"{type(error).__name__}: {error}",
    }
    assert ready.thread.is_alive()
    ready.agent.close()
    assert ready.end() == 1


def test_a_mistake_of_the_users_is_final(ready: Rank) -> None:
    ready.executor.raises["reward_inf"] = RewardError("reward m:f returned nan")
    ready.agent.send({"type": messages.CALL, "seq": 5, "name": "reward_inf", "step": 9})
    said = ready.hear()
    assert said["final"] is True
    assert (said["exception"], "traceback" in said) == ("reward m:f returned nan", False)


def test_what_a_host_lacks_at_the_start_is_not_the_trial_s_fault(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: object) -> NoReturn:
        raise EnvironmentFailure("/models/m is not on n1")

    monkeypatch.setattr(serve_module, "build", build)
    rank.agent.send(START)
    said = rank.hear()
    assert said["cause"] == "environment"
    assert "final" not in said


def test_a_damaged_checkpoint_is_named(ready: Rank) -> None:
    error = DamagedCheckpointError("step-7.2: actor.0 has another checksum", "step-7.2")
    ready.executor.raises["gen"] = error
    ready.agent.send({"type": messages.CALL, "seq": 5, "name": "gen", "step": 9})
    assert ready.hear()["damaged"] == "step-7.2"


def test_long_errors_are_cut(ready: Rank) -> None:
    ready.executor.raises["gen"] = ValueError("x" * 3_000_000)
    ready.agent.send({"type": messages.CALL, "seq": 5, "name": "gen", "step": 9})
    said = ready.hear()
    assert said["exception"].startswith("ValueError: xxx")
    assert len(said["exception"]) + len(said["traceback"]) < 100_000


def test_last_words_come_whole_to_a_slow_agent(rank: Rank) -> None:
    """More than one pipe buffer of output is queued before them."""
    rank.executor.describe_data = lambda: {"size": "x" * 2_000_000}  # type: ignore[method-assign]
    rank.executor.raises["gen"] = ValueError("bad")
    rank.agent.send(START)
    rank.agent.send({"type": messages.CALL, "seq": 5, "name": "gen", "step": 9})
    assert len(rank.hear()["size"]) == 2_000_000
    assert rank.hear()["exception"] == "ValueError: bad"


def test_a_rank_that_is_not_ended_leaves_by_itself(
    ready: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "LINGER_S", 0.05)
    ready.executor.raises["gen"] = ValueError("bad")
    ready.agent.send({"type": messages.CALL, "seq": 5, "name": "gen", "step": 9})
    assert ready.end() == 1
    assert ready.hear()["exception"] == "ValueError: bad"


def test_failed_start_is_reported(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> FakeExecutor:
        raise OSError("no such file")

    broken: Callable[..., FakeExecutor] = fail
    monkeypatch.setattr(serve_module, "build", broken)
    rank.agent.send(START)
    said = rank.hear()
    assert (said["call"], said.get("step")) == ("start", None)
    assert said["exception"] == "OSError: no such file"
