"""The agent's main loop: its next action depends on the end of the incarnation."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl.errors import (
    EnvironmentFailure,
    ReportedError,
    SlurmrlError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
)
from slurmrl.plan.model import Plan
from slurmrl.run import keys
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure
from slurmrl.watch import published
from slurmrl.workers.agent import __main__ as agent_module
from slurmrl.workers.agent import incarnation as incarnation_module
from slurmrl.workers.agent.__main__ import AGAIN, FAILED, OK, Agent
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.incarnation import Incarnation
from slurmrl.workers.polling import PollIntervals

pytestmark = pytest.mark.usefixtures("signal_handlers")
DIED = ReportedError(Failure(cause="died", reason="rank 1 died", rank=1, exit_code=-9))
Step = Callable[[Incarnation], None]


class Script(Incarnation):
    """Scripted incarnations without processes."""

    steps: list[Step]

    def run(self) -> None:
        type(self).steps.pop(0)(self)


@pytest.fixture
def host(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(agent_module, "Incarnation", Script)
    monkeypatch.setattr(Agent, "_take_log", lambda agent: None)
    monkeypatch.setattr(incarnation_module, "LATE_BEGIN_S", 0.1)
    Script.steps = []
    found = Host(run, 1, "trainer")
    yield found
    assert Script.steps == []


def begins(*, job: str | None = None) -> Step:
    """Let the master begin an incarnation that this host joins."""

    def step(incarnation: Incarnation) -> None:
        host = incarnation.host
        begin(host.history, {"job": job or host.identity.job})
        state = host.begun(incarnation.after)
        assert state is not None
        incarnation._join(state.incarnation)

    return step


def fails(error: SlurmrlError) -> Step:
    def step(incarnation: Incarnation) -> None:
        raise error

    return step


def both(*steps: Step) -> Step:
    def step(incarnation: Incarnation) -> None:
        for one in steps:
            one(incarnation)

    return step


def live(host: Host, *steps: Step) -> int:
    Script.steps = list(steps)
    return Agent(host).run()


def failure(host: Host, number: int) -> Failure:
    found = published.failure(Host(host.paths, 1, "trainer").names, number)
    assert found is not None
    return found


def test_host_renews_its_lease_while_its_processes_take_long_to_end(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed workers may take longer to free their devices than a lease lasts."""
    own = Host(run, 1, "trainer")
    renewals: list[None] = []

    def renew() -> None:
        renewals.append(None)
        raise EnvironmentFailure("the directory does not answer")

    monkeypatch.setattr(own.lease_guard, "turn", renew)
    monkeypatch.setattr(own.children, "all_ended", lambda: len(renewals) >= 3)
    own.close()
    assert len(renewals) == 3


def test_user_error_before_an_incarnation_ends_the_trial(host: Host) -> None:
    """The error occurs once, and is not tried again on this or another host."""
    assert live(host, fails(UsageError("interface: there is no eth7"))) == FAILED
    last = host.history.read()[-1]
    assert (last.kind, last.incarnation) == (Kind.FAILED, 0)
    assert "no eth7" in last.data["reason"]
    assert not host.paths.hosts.exists() or not list(host.paths.hosts.iterdir())


def test_user_error_at_agent_start_ends_the_trial(run: RunPaths) -> None:
    run.config.write_text("total_steps: none\n")
    assert agent_module.serve(run.run, 1, "trainer") == FAILED
    last = History(run.history).read()[-1]
    assert last.kind is Kind.FAILED
    assert "total_steps" in last.data["reason"]


def test_processes_that_do_not_exit_do_not_change_the_outcome(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation_module, "EXIT_TIMEOUT_S", 0.1)

    def told_to_exit(incarnation: Incarnation) -> None:
        incarnation._all_ended = lambda: None  # type: ignore[method-assign]
        incarnation._let_exit()

    assert live(host, both(begins(), told_to_exit)) == OK


def test_agent_serves_the_next_incarnation_after_a_failure(host: Host) -> None:
    assert live(host, both(begins(), fails(DIED)), both(begins(), fails(DIED)), begins()) == OK
    assert [record.incarnation for record in host.history.read()] == [1, 2, 3]
    died = Failure(
        cause="died", reason="rank 1 died", rank=1, exit_code=-9, host=host.identity.host
    )
    assert failure(host, 1) == failure(host, 2) == died
    said = LogReader(host.paths.agent_log(2, "trainer", 0)).read()
    assert [message["type"] for message in said] == ["hello", "failed"]
    assert said[1]["reason"] == "rank 1 died"


def test_stale_incarnation_is_not_reported_as_failure(host: Host) -> None:
    over = fails(StaleIncarnationError("the master ended incarnation 1"))
    assert live(host, both(begins(), over), begins()) == OK
    assert keys.failure(1) not in Host(host.paths, 1, "trainer").names.find_subtree("incarnation")


def test_agent_exits_if_the_trial_ended(host: Host) -> None:
    def gives_up(incarnation: Incarnation) -> None:
        end(incarnation.host.history, Kind.FAILED, {"reason": "in vain"})

    assert live(host, both(begins(), fails(TrialEndedError("cancelled")))) == OK
    assert live(host, both(begins(), gives_up, fails(DIED))) == OK


def test_agent_exits_if_another_job_takes_over(host: Host) -> None:
    """If this job started again, both jobs would end each other's incarnations forever."""

    def taken(incarnation: Incarnation) -> None:
        begin(incarnation.host.history, {"job": "99.0.0"})
        incarnation.host.check_fence()

    assert live(host, both(begins(), taken)) == OK


def test_agent_continues_after_incarnation_of_earlier_job(host: Host) -> None:
    begin(host.history, {"job": "1.0.0"})
    assert host.begun(0) is None
    assert live(host, both(begins(), fails(DIED)), begins()) == OK


def test_agent_starts_no_incarnation_after_a_warning(host: Host) -> None:
    def warned(incarnation: Incarnation) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        incarnation._send_warning()

    assert live(host, both(begins(), warned, fails(DIED))) == FAILED
    names = Host(host.paths, 1, "trainer").names
    assert json.loads(names.get(keys.warned(1)))["signal"] == "SIGTERM"
    said = LogReader(host.paths.agent_log(1, "trainer", 0)).read()
    assert [message["type"] for message in said][1:] == ["warning", "failed"]


def test_agent_exits_normally_if_a_warned_incarnation_ends_well(host: Host) -> None:
    def warned(incarnation: Incarnation) -> None:
        os.kill(os.getpid(), signal.SIGUSR2)

    assert live(host, both(warned, begins())) == OK


@pytest.mark.parametrize(
    ("cause", "reason"), [("lost_host", "n7 is lost"), ("gpu_fault", "ECC on n7")]
)
def test_round_ends_if_another_host_is_lost(host: Host, cause: str, reason: str) -> None:
    def ended(incarnation: Incarnation) -> None:
        said = {"cause": cause, "reason": reason, "host": "n7"}
        incarnation.host.names.add(keys.failure(1), json.dumps(said))
        raise StaleIncarnationError("the master ended incarnation 1")

    assert live(host, both(begins(), ended)) == AGAIN


def test_gpu_failure_removes_the_host_from_the_job(host: Host) -> None:
    """Its own agent gives up the host, and agents on other hosts see the failure."""
    fault = ReportedError(Failure(cause="gpu_fault", reason="ECC", host="me"))
    assert live(host, both(begins(), fails(fault))) == AGAIN
    said = json.loads(Host(host.paths, 1, "trainer").names.get(keys.lost(host.identity.host)))
    assert said == {"incarnation": 1, "job": host.identity.job}


def test_environment_failure_is_reported_and_fails_the_agent(host: Host) -> None:
    assert live(host, both(begins(), fails(EnvironmentFailure("no such interface")))) == FAILED
    assert failure(host, 1).cause == "environment"


def test_ranks_that_do_not_connect_are_restarted_in_the_same_job(host: Host) -> None:
    alone = Failure(cause="environment", reason="connection refused", rank=1, echo=True)
    assert live(host, both(begins(), fails(ReportedError(alone))), begins()) == OK


def test_agent_gives_up_after_repeated_failures_before_begin(host: Host) -> None:
    """The history cannot count an incarnation that never began."""
    most = host.most_failures
    assert live(host, *[fails(DIED)] * (most + 1)) == FAILED
    assert host.history.read() == []


def test_failure_before_begin_counts_for_the_next_incarnation(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master is given time to begin, so that the history counts this start."""
    monkeypatch.setattr(incarnation_module, "LATE_BEGIN_S", 60.0)
    monkeypatch.setattr(type(host.children), "master_runs", property(lambda children: True))
    turns = host.children.turn

    def turn(timeout_s: float) -> Any:
        if not host.history.read():
            begin(host.history, {"job": host.identity.job})
        return turns(timeout_s)

    monkeypatch.setattr(host.children, "turn", turn)
    monkeypatch.setattr(type(host.children), "end", lambda children, **more: None)
    assert live(host, fails(EnvironmentFailure("cannot start rank 0 with 'nothing'"))) == FAILED
    assert "cannot start rank 0" in failure(host, 1).reason
    said = LogReader(host.paths.agent_log(1, "trainer", 0)).read()
    assert [message["type"] for message in said] == ["hello", "failed"]


def test_agent_fails_if_the_directory_stays_unreachable(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalls(incarnation: Incarnation) -> None:
        def fail(history: History, *arguments: Any, **more: Any) -> None:
            raise EnvironmentFailure("the server is away")

        monkeypatch.setattr(History, "read", fail)
        monkeypatch.setattr(agent_module, "LOOK_TIMEOUT_S", 0.0)

    assert live(host, both(begins(), stalls, fails(DIED))) == FAILED


@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("3,4", "3")])
def test_gpus_are_assigned_if_slurm_does_not_assign_them(
    host: Host, monkeypatch: pytest.MonkeyPatch, visible: str | None, first: str
) -> None:
    """The variable is not set on your own machine, and on clusters where Slurm does not know of
    GPUs.
    """
    host.group = host.group.model_copy(update={"workers_per_host": 2, "gpus_per_worker": 1})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(EnvironmentFailure, match="gives 0"):
        host.devices()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for local, directive in ((True, "gres"), (False, "none")):
        host.slurm = host.slurm.model_copy(update={"gpu_directive": directive})
        host.local = local
        assert host.devices() == [first, str(int(first) + 1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EnvironmentFailure, match="gives 0"):
        host.devices()


@pytest.mark.parametrize(
    ("local", "directive", "alone"),
    [(True, "gres", False), (False, "none", False), (False, "gres", True)],
)
def test_workers_know_if_their_gpus_are_exclusive(
    host: Host, monkeypatch: pytest.MonkeyPatch, local: bool, directive: str, alone: bool
) -> None:
    """If the scheduler assigns each GPU to one job, memory used by others is a fault."""
    host.slurm = host.slurm.model_copy(update={"gpu_directive": directive})
    host.local = local
    sent: list[Any] = []
    slot = SimpleNamespace(rank=1, send=sent.append)

    def forms(incarnation: Incarnation) -> None:
        state = host.begun(0)
        assert state is not None
        with monkeypatch.context() as patched:
            patched.setattr(host.children, "slots", [slot])
            incarnation._form(state)

    assert live(host, both(begins(), forms)) == OK
    assert [start.exclusive for start in sent] == [alone]


@pytest.fixture
def other(run: RunPaths) -> Host:
    """Return the identity of task 0 of another group than the trainers."""
    plan = Plan.read(run.plan)
    change = {"name": "rollout", "elastic": True, "hosts": 40}
    groups = (*plan.groups, plan.trainers.model_copy(update=change))
    run.plan.write_text(plan.model_copy(update={"groups": groups}).to_json())
    return Host(run, 1, "rollout")


def test_user_error_of_a_rollout_agent_does_not_end_the_trial(run: RunPaths) -> None:
    run.config.write_text("total_steps: none\n")
    with pytest.raises(UsageError):
        agent_module.serve(run.run, 1, "rollout")
    assert History(run.history).read() == []


def test_poll_interval_grows_with_the_hosts_of_all_groups(other: Host) -> None:
    """The budget of file operations is that of the trial."""
    assert other.intervals == PollIntervals.of(41, other.cluster.heartbeat_s)
