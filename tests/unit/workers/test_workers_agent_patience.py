"""An agent on a directory that does not answer: it goes on trying, and tells nothing wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.channel.log import LogReader, LogWriter
from slurmrl.errors import EnvironmentFailure, OwnershipError, WaitTimeoutError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.paths import RunPaths
from slurmrl.submission.prepare import prepare
from slurmrl.submission.submit import propose
from slurmrl.workers import patience
from slurmrl.workers.agent.agent import Agent
from tests.fake_runs import write_config


class Broken(SystemCalls):
    fails = False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path, flags, mode)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    root = str(tmp_path / "runs")
    proposal = propose(write_config(tmp_path), [], root=root, scheduler="local")
    prepare(proposal.paths, proposal.settings, proposal.plan)
    return proposal.paths


@pytest.fixture
def agent(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setattr(patience, "RETRY_S", (0.001, 0.002))
    agent = Agent(run, 1, "trainer")
    yield agent
    agent.children.close()


def fails_at_first(times: int, value: object) -> list[object]:
    return [*[EnvironmentFailure("broken")] * times, value]


def answer(script: list[object]) -> object:
    found = script.pop(0)
    if isinstance(found, Exception):
        raise found
    return found


def test_what_fails_is_tried_again(agent: Agent) -> None:
    script = fails_at_first(20, "done")
    assert agent._patiently("do it", lambda: answer(script)) == "done"


def test_a_directory_of_others_is_no_reason_to_wait(agent: Agent) -> None:
    script: list[object] = [OwnershipError("theirs"), "done"]
    with pytest.raises(OwnershipError):
        agent._patiently("do it", lambda: answer(script))


def test_silence_of_the_directory_does_not_count_as_waiting(agent: Agent) -> None:
    script = fails_at_first(20, "done")
    assert agent._wait("it", lambda: answer(script), timeout_s=0.0) == "done"
    with pytest.raises(WaitTimeoutError, match="waited 0 s for it"):
        agent._wait("it", lambda: None, timeout_s=0.0)


def test_news_wait_for_the_directory_and_keep_their_order(agent: Agent, run: RunPaths) -> None:
    calls = Broken()
    agent.replies = LogWriter(run.agent_log(1, "trainer", 0), calls=calls)
    reader = LogReader(run.agent_log(1, "trainer", 0))
    agent._say({"n": 0})
    calls.fails = True
    agent._say({"n": 1})
    agent._turn(0.0)
    agent._say({"n": 2})
    calls.fails = False
    assert [message["n"] for message in reader.read()] == [0]
    agent._turn(0.0)
    assert [message["n"] for message in reader.read()] == [1, 2]
    size = run.agent_log(1, "trainer", 0).stat().st_size
    agent._turn(0.0)
    assert run.agent_log(1, "trainer", 0).stat().st_size == size


def test_a_name_that_got_through_after_all_is_no_conflict(agent: Agent) -> None:
    agent._publish("key", "ours")
    agent._publish("key", "ours")
    assert agent.names.get("key") == "ours"


def test_names_that_go_with_the_agent_carry_its_lease(agent: Agent) -> None:
    agent._publish("address", "x", delete_on_exit=True)
    agent._publish("stays", "x")
    owners = {key: entry.owner for key, entry in agent.names.entries().items()}
    assert owners["address"] == "trainer.0.0"
    assert owners["stays"] == owners["attempt/trainer/0/0"] == ""
    agent._forget()
    assert sorted(agent.names.entries()) == ["attempt/trainer/0/0", "stays"]
