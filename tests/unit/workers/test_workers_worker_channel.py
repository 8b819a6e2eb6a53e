"""The master's channel to the ranks: messages, missing ranks, and the ranks that caused errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl import backoff
from slurmrl.errors import EnvironmentFailure, ReportedError, WaitTimeoutError
from slurmrl.plan.model import Plan
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.wakeups import WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure, Identity, Warned
from slurmrl.workers.master import worker_channel
from slurmrl.workers.master.worker_channel import Mailbox, WorkerChannel
from slurmrl.workers.messages import (
    AGENT_LOG,
    CONTROL_LOG,
    Done,
    Exit,
    FromAgent,
    Hello,
    LoadBatch,
    Order,
    Over,
    Preparing,
    Ready,
    RunCall,
    WakeMaster,
)
from slurmrl.workers.polling import GONE_S

INCARNATION = 3
EARLY = 10**6
"""The number of an order before those of a test."""
LOOPBACK = "127.0.0.1"
LONGEST_S = 600.0
"""Longer than a test: what is read earlier was announced by a wake-up."""


def hello(task: int, host: str = "") -> Hello:
    return Hello(agent=Identity("trainer", task, 0, host or f"n{task}", "41.0.0", "41_2"))


def done(rank: int, number: int, tokens: int = 0) -> Done:
    return Done(rank=rank, seq=number, seconds=1.0, tokens=tokens)


def ready(rank: int) -> Ready:
    return Ready(rank=rank, size=rank, fingerprint="f")


class Agent:
    """The log of an agent."""

    def __init__(self, path: Path) -> None:
        self._log = LogWriter(path)

    def append(self, *messages: FromAgent) -> None:
        self._log.append(*map(AGENT_LOG.to_json, messages))


class Site:
    """Two hosts with two ranks each, whose agents write the messages of a test."""

    def __init__(self, paths: RunPaths, plan: Plan, **more: Any) -> None:
        self.script: list[Callable[[], None]] = []
        self.channel = WorkerChannel(paths, plan, INCARNATION, self._while_waiting, **more)
        self.agents = [Agent(paths.agent_log(INCARNATION, "trainer", task)) for task in range(2)]
        self._control = LogReader(paths.master_log(INCARNATION))

    def posted(self) -> list[Order]:
        return [CONTROL_LOG.from_json(values) for values in self._control.read()]

    def _while_waiting(self) -> None:
        if self.script:
            self.script.pop(0)()


@pytest.fixture
def site(paths: RunPaths, plans: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("slurmrl.run.channel.follower.ANNOUNCED_FIRST_POLL_S", 0.01)
    return Site(paths, plans(hosts=2, per_host=2))


def test_posted_messages_are_numbered_in_order(site: Site) -> None:
    load = LoadBatch(step=3, items=((0, 7), (1, 2)), evaluation=True)
    call = RunCall(step=3, name="gen", scalars={"kl_coef": 0.1, "loss": float("inf")})
    assert site.channel.post(load, call) == [0, 1]
    assert site.channel.post(Exit()) == [2]
    assert site.posted() == [load, replace(call, seq=1), Exit(seq=2)]


def test_incarnation_fails_if_its_control_log_was_removed(
    site: Site, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is moved for a moment is waited for."""
    now, acts = 0.0, []
    log, aside = paths.master_log(INCARNATION), paths.run / "aside"

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert now < 600, "it waits forever"
        if acts and now > GONE_S / 2:
            acts.pop()()

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(worker_channel, "time", clock)
    monkeypatch.setattr(
        worker_channel, "retry", lambda what, action: backoff.retry(what, action, sleep)
    )
    acts.append(lambda: aside.rename(log))
    log.rename(aside)
    site.channel.post(Exit())
    assert site.posted() == [Exit(seq=0)]
    log.unlink()
    with pytest.raises(ReportedError, match=f"{log} was removed") as caught:
        site.channel.post(Exit())
    assert caught.value.failure.cause == "environment"
    assert caught.value.failure.host == "", "no host is to blame"


def test_collect_returns_the_answers_of_all_ranks(site: Site) -> None:
    site.agents[0].append(hello(0), done(0, 5, 1), done(1, 5, 2))
    site.agents[1].append(done(2, 5, 3), done(3, 5, 4))
    answers = site.channel.collect(5, "a call", 10)
    assert {rank: answer.tokens for rank, answer in answers.items()} == {0: 1, 1: 2, 2: 3, 3: 4}


def test_answers_to_later_messages_are_kept_for_later(site: Site) -> None:
    site.agents[0].append(done(0, 0), done(0, 1), done(1, 0), done(1, 1))
    site.agents[1].append(done(2, 0), done(3, 0))
    assert set(site.channel.collect(0, "loading", 10)) == {0, 1, 2, 3}
    site.script = [lambda: site.agents[1].append(done(2, 1), done(3, 1))]
    assert set(site.channel.collect(1, "a call", 10)) == {0, 1, 2, 3}
    assert site.channel.mailbox.done == {}


def test_deadline_names_ranks_hosts_and_jobs(site: Site) -> None:
    site.agents[1].append(hello(1), done(2, 0))
    with pytest.raises(WaitTimeoutError) as caught:
        site.channel.collect(0, "actor_gen of step 7", 0.0)
    assert str(caught.value) == (
        "waited 0 s for rank 0 (its agent has not reported), rank 1 (its agent has not reported), "
        "rank 3 (n1, job 41_2) to finish actor_gen of step 7"
    )


def test_start_deadline_names_missing_ranks(site: Site) -> None:
    site.agents[0].append(hello(0), *map(ready, (0, 1, 3)))
    site.agents[1].append(hello(1))
    with pytest.raises(WaitTimeoutError, match=r"for rank 2 \(n1, job 41_2\) to be ready"):
        site.channel.wait_ready(0.0)


def test_tokenization_postpones_the_start_deadline(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenization of a file may take longer than start_timeout_s. Silence still ends the
    start.
    """
    now_s = 0.0

    def later(*sent: FromAgent) -> Callable[[], None]:
        def act() -> None:
            nonlocal now_s
            now_s += 6.0
            site.agents[0].append(*sent)

        return act

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr(worker_channel, "time", clock)
    preparing = Preparing(rank=0)
    all_ready = map(ready, range(4))
    site.script = [later(preparing), later(preparing), later(*all_ready)]
    assert set(site.channel.wait_ready(10.0)) == {0, 1, 2, 3}
    assert now_s == 18.0
    site.channel.mailbox.ready.clear()
    site.script = [later(preparing), later(), later()]
    with pytest.raises(WaitTimeoutError, match="waited 10 s for rank 0"):
        site.channel.wait_ready(10.0)


def test_channel_reports_the_ranks_it_waits_for(site: Site) -> None:
    seen: list[Any] = []
    site.agents[0].append(hello(0), done(0, 5), done(1, 5))
    site.script = [
        lambda: seen.append(site.channel.waiting()),
        lambda: site.agents[1].append(done(3, 5)),
        lambda: seen.append(site.channel.waiting()),
        lambda: site.agents[1].append(done(2, 5)),
    ]
    assert site.channel.waiting() is None
    site.channel.collect(5, "gen of step 3", 10)
    assert [(one["for"], one["what"]) for one in seen] == [
        ([2, 3], "to finish gen of step 3"),
        ([2], "to finish gen of step 3"),
    ]
    assert 0 <= seen[0]["since_s"] <= seen[1]["since_s"]
    assert site.channel.waiting() is None


def test_error_of_a_rank_ends_the_wait_for_answers(site: Site) -> None:
    failure = Failure(cause="exception", reason="rank 2: ValueError: bad", rank=2)
    site.agents[1].append(done(3, 0), failure)
    with pytest.raises(ReportedError, match="rank 2: ValueError: bad") as caught:
        site.channel.collect(0, "a call", 10)
    assert caught.value.failure == failure


def test_master_announces_the_end_of_an_incarnation_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.channel.end()
    assert site.posted() == [Over()]

    def fail(*arguments: Any) -> None:
        raise EnvironmentFailure("the server is away")

    monkeypatch.setattr(LogWriter, "append", fail)
    site.channel.end()


def test_warning_is_received_while_collecting_answers(site: Site) -> None:
    assert not site.channel.warned
    site.agents[0].append(done(0, 0), done(1, 0))
    site.agents[1].append(Warned(signal="SIGUSR2"), done(2, 0), done(3, 0))
    site.channel.collect(0, "a call", 10)
    assert site.channel.warned


def test_unreachable_directory_does_not_end_the_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of other agents during this time are not lost."""
    site.agents[0].append(done(0, 0), done(1, 0))
    site.agents[1].append(done(2, 0), done(3, 0))
    read = LogReader.read
    failures = ["one", "two"]

    def stalling(reader: LogReader) -> list[dict[str, Any]]:
        if str(reader.path).endswith(".1") and failures:
            failures.pop()
            raise EnvironmentFailure("the server is away")
        return read(reader)

    monkeypatch.setattr(LogReader, "read", stalling)
    assert set(site.channel.collect(0, "a call", 30)) == {0, 1, 2, 3}
    assert failures == []


def test_newest_hello_of_an_agent_is_kept() -> None:
    mailbox = Mailbox()
    mailbox.put(hello(0))
    mailbox.put(hello(0, "n9"))
    assert mailbox.agents["trainer/0"].host == "n9"


def test_messages_of_other_groups_are_not_taken_as_answers(
    paths: RunPaths, plans: Callable[..., Plan]
) -> None:
    """Messages of another group never count as an answer, a failure or a warning of the
    trainers.
    """
    site = Site(paths, plans(hosts=2, per_host=2, tasks=3))
    for task in range(3):
        failure = Failure(cause="died", reason="rank 0 of rollout/0", rank=0)
        Agent(paths.agent_log(INCARNATION, "rollout", task)).append(done(0, 5), done(1, 5), failure)
    site.agents[0].append(done(0, 5, 1), done(1, 5, 2))
    site.agents[1].append(hello(1), done(2, 5, 3))
    with pytest.raises(WaitTimeoutError, match=r"for rank 3 \(n1, job 41_2\) to finish a call"):
        site.channel.collect(5, "a call", 0.0)


class SharedSite(Site):
    """Two hosts and the master with sockets, on a shared file system."""

    def __init__(self, paths: RunPaths, plan: Plan) -> None:
        self.wakeups = WakeupSocket(LOOPBACK)
        self.sockets = [WakeupSocket(LOOPBACK) for _ in range(2)]
        super().__init__(paths, plan, wakeups=self.wakeups, longest_poll_s=LONGEST_S)
        for task, (agent, wakeups) in enumerate(zip(self.agents, self.sockets, strict=True)):
            agent.append(replace(hello(task), wakeups=wakeups.address))
        self.script = [
            lambda: self.agents[0].append(done(0, EARLY), done(1, EARLY), done(2, EARLY))
        ]
        self.script += [lambda: self.agents[1].append(done(3, EARLY))]
        self.channel.collect(EARLY, "nothing", 30)
        self.reads: list[str] = []

    def woken(self) -> list[bool]:
        """Return the agents that got a wake-up since the last call."""
        heard = [wakeups.receive().sources for wakeups in self.sockets]
        assert all(sources <= {self.wakeups.address.source} for sources in heard)
        return [bool(sources) for sources in heard]

    def answer(self, task: int, *answers: FromAgent) -> None:
        self.agents[task].append(*answers)
        self.sockets[task].wake([self.wakeups.address])


@pytest.fixture
def shared(
    paths: RunPaths, plans: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SharedSite]:
    monkeypatch.setattr("slurmrl.run.channel.follower.is_local", lambda directory: False)
    monkeypatch.setattr("slurmrl.run.channel.follower.ANNOUNCED_FIRST_POLL_S", LONGEST_S)
    found = SharedSite(paths, plans(hosts=2, per_host=2))
    yield found
    for wakeups in (found.wakeups, *found.sockets):
        wakeups.close()


def test_control_log_begins_with_the_masters_address(shared: SharedSite) -> None:
    assert shared.posted() == [WakeMaster(wakeups=shared.wakeups.address)]


def test_agents_are_notified_after_every_post(shared: SharedSite) -> None:
    assert shared.woken() == [False, False]
    shared.channel.post(Exit())
    assert shared.woken() == [True, True]
    shared.channel.end()
    assert shared.woken() == [True, True]
    assert shared.woken() == [False, False]


def test_notification_causes_a_read_of_only_its_agents_log(
    shared: SharedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a thousand hosts therefore cost a thousand reads, not a million."""
    read = LogReader.read
    looks: list[int] = []

    def counting(reader: LogReader) -> list[dict[str, Any]]:
        looks.append(int(reader.path.name.rpartition(".")[2]))
        return read(reader)

    for task in (1, 0):  # after this, both are known to send wake-ups
        shared.answer(task, done(2 * task, 0), done(2 * task + 1, 0))
    shared.channel.collect(0, "a call", 30)
    monkeypatch.setattr(LogReader, "read", counting)
    shared.script = [lambda: shared.answer(0, done(0, 1), done(1, 1))]
    shared.script += [lambda: shared.answer(1, done(2, 1), done(3, 1))]
    assert set(shared.channel.collect(1, "a call", 30)) == {0, 1, 2, 3}
    assert looks == [0, 1]
