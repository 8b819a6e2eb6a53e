"""The batch process: starts that it skips, processes that it starts, and signals that
it forwards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from slurmrl import backoff
from slurmrl.config.load import dump, load_resolved
from slurmrl.errors import EnvironmentFailure, SchedulerError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.events import read_all
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import begin, end, resume
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure, Identity
from slurmrl.scheduler.client import SlurmClient, is_dead
from slurmrl.scheduler.parse import HostRow
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.watch import overview
from slurmrl.workers.failure import publish, publish_attempt
from slurmrl.workers.link import reason_to_leave
from slurmrl.workers.supervisor import __main__ as supervisor
from slurmrl.workers.supervisor import rounds
from slurmrl.workers.supervisor.__main__ import parse
from slurmrl.workers.supervisor.rounds import (
    FRUITLESS_ROUNDS,
    SOUND_ROUND_S,
    JobHosts,
    Rounds,
    blame_hosts,
)
from slurmrl.workers.supervisor.tasks_inside import TasksInside
from tests.support.trials import alive, wait_until

REPOSITORY = Path(__file__).parents[3]


def options(paths: RunPaths, launcher: str = "direct") -> Namespace:
    arguments = ["--run", str(paths.run), "--submission", "2", "--group", "trainer"]
    return parse([*arguments, "--launcher", launcher])


def submission(paths: RunPaths, number: int) -> None:
    request = {"scheduler": "local", "total_steps": 4, "heartbeat_s": 1.0}
    paths.submission(number).mkdir()
    paths.submission_request(number).write_text(json.dumps(request))


def test_new_and_interrupted_trials_continue(paths: RunPaths) -> None:
    assert reason_to_leave(paths, 1) is None
    submission(paths, 1)
    begin(History(paths.history), {})
    assert reason_to_leave(paths, 1) is None


@pytest.mark.parametrize("kind", [Kind.FINISHED, Kind.FAILED, Kind.CANCELLED])
def test_supervisor_exits_for_an_ended_trial(paths: RunPaths, kind: Kind) -> None:
    history = History(paths.history)
    begin(history, {})
    end(history, kind, {})
    assert reason_to_leave(paths, 1) == f"the trial has ended ({kind})"
    resume(history, {})
    assert reason_to_leave(paths, 1) is None


def test_unreachable_directory_does_not_end_the_job(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(History(paths.history), Kind.CANCELLED, {})
    read, tries = History.read, []

    def silent_at_first(self: History) -> list[Record]:
        tries.append(self)
        if len(tries) < 3:
            raise EnvironmentFailure("stale file handle")
        return read(self)

    monkeypatch.setattr(History, "read", silent_at_first)
    monkeypatch.setattr(backoff, "OUTAGE_S", (0.01, 0.01))
    assert reason_to_leave(paths, 1) == "the trial has ended (cancelled)"


def test_supervisor_exits_after_a_newer_submission(paths: RunPaths) -> None:
    for number in (1, 2):
        submission(paths, number)
    assert reason_to_leave(paths, 1) == "a newer submission has superseded submission 1"
    assert reason_to_leave(paths, 2) is None


def test_submission_without_jobs_is_ignored(paths: RunPaths) -> None:
    """The submitter was killed after making the folder.

    A submission exists once its request exists.
    """
    submission(paths, 1)
    paths.submission(2).mkdir()
    assert reason_to_leave(paths, 1) is None
    submission(paths, 3)
    assert reason_to_leave(paths, 1) is not None


SUPERVISOR = """
import sys
from argparse import Namespace
from pathlib import Path
from slurmrl.run.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers.supervisor import rounds
from slurmrl.workers.supervisor.rounds import JobHosts
paths = RunPaths(Path.cwd() / "run")
for directory in paths.directories():
    directory.mkdir(parents=True)
rounds.agent_command = lambda *_, **__: [sys.executable, "-c", sys.argv[2]]
rounds.SOUND_ROUND_S = float(sys.argv[4])
options = Namespace(launcher=sys.argv[1], run=paths.run, group=sys.argv[3], submission=1)
sys.exit(rounds.Rounds(options, paths, JobHosts(paths, 1)).run())
"""
AGENT = """
import os, signal, time
from pathlib import Path
from slurmrl.workers.supervisor.rounds import SIGNALS
def hear(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR2:
        raise SystemExit(3)
for number in SIGNALS:
    signal.signal(number, hear)
print("agent", os.getpid(), "blocked" if signal.pthread_sigmask(0, ()) else "open", flush=True)
while not Path("go").exists():
    time.sleep(0.02)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
time.sleep(120)
"""


class Job:
    """A supervisor with an agent that reports its signals."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        assert process.stdout is not None
        self.process = process
        self.lines = process.stdout
        self.folder = folder

    def line(self) -> str:
        return self.lines.readline().strip()

    def open_agent(self) -> None:
        (self.folder / "go").touch()


@contextmanager
def job(
    folder: Path, launcher: str, group: str = "trainer", sound_s: float = SOUND_ROUND_S
) -> Iterator[Job]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, launcher, AGENT, group, str(sound_s)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Job(process, folder)
    finally:
        with suppress(ProcessLookupError):  # under srun the agent does not die with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_warning_is_relayed_and_the_exit_code_returned(tmp_path: Path) -> None:
    """No further round starts after a warning."""
    with job(tmp_path, "direct") as running:
        assert running.line().endswith("blocked"), "signals wait until the agent has handlers"
        begin(History(tmp_path / "run" / "history"), {})
        running.process.send_signal(signal.SIGUSR2)
        running.open_agent()
        assert running.line() == "heard SIGUSR2"
        running.process.send_signal(signal.SIGTERM)
        assert running.line() == "heard SIGTERM"
        assert running.process.wait(timeout=60) == 3
        assert running.line() == ""


def test_srun_gets_only_the_warning_signal(tmp_path: Path) -> None:
    """Slurm itself sends TERM to the step; a second one would make srun kill it."""
    with job(tmp_path, "srun") as running:
        assert running.line().endswith("open"), "srun passes its mask on to nobody"
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGUSR2)
        assert running.line() == "heard SIGUSR2"
        assert running.process.poll() is None


def test_agents_are_restarted_until_rounds_begin_no_incarnation(tmp_path: Path) -> None:
    history = History(tmp_path / "run" / "history")
    with job(tmp_path, "direct") as running:
        for number in range(FRUITLESS_ROUNDS + 2):
            agent = int(running.line().split()[1])
            if number in (0, 2):
                begin(history, {})
            if number == 3:
                break
            os.kill(agent, signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        os.kill(int(running.line().split()[1]), signal.SIGKILL)
        assert running.process.wait(timeout=60) == 128 + signal.SIGKILL
        assert running.line() == ""


@pytest.mark.parametrize(("group", "goes_on"), [("rollout", True), ("trainer", False)])
def test_long_running_task_is_restarted_without_limit(
    tmp_path: Path, group: str, goes_on: bool
) -> None:
    with job(tmp_path, "direct", group, sound_s=0.0) as running:
        for _ in range(FRUITLESS_ROUNDS):
            os.kill(int(running.line().split()[1]), signal.SIGKILL)
        assert running.line().startswith("agent") == goes_on


def test_items_of_a_dead_task_do_not_wait_for_its_next_agent(tmp_path: Path) -> None:
    """The next attempt begins when the agent is started again.

    Attempts of other jobs do not count.
    """
    paths = RunPaths(tmp_path / "run")
    with job(tmp_path, "direct", "rollout") as running:
        agent = int(running.line().split()[1])
        names = NameStore(paths.names)
        for attempt, claimed_by in ((2, f"{running.process.pid}.0.0"), (3, "another.0.0")):
            claim = Identity("rollout", 0, attempt, "n1", claimed_by, "", agent)
            text = json.dumps(documents.to_json(claim))
            names.add(keys.attempt("rollout", 0, attempt), text)
        os.kill(agent, signal.SIGKILL)
        assert running.line().startswith("agent")
        assert [one.name for one in paths.rollouts.iterdir()] == ["rollout.0.3"]


def test_no_round_starts_after_the_end(tmp_path: Path) -> None:
    """This holds for any end of the agents, because srun also fails after a recovered kill."""
    with job(tmp_path, "direct") as running:
        agent = int(running.line().split()[1])
        history = History(tmp_path / "run" / "history")
        begin(history, {})
        end(history, Kind.CANCELLED, {})
        os.kill(agent, signal.SIGKILL)
        assert running.process.wait(timeout=60) == 0
        assert running.line() == ""


@pytest.mark.parametrize(
    ("dead", "states"),
    [
        (True, ("down", "down*", "allocated*", "fail", "failing", "unknown")),
        (False, ("allocated", "mixed", "idle", "draining", "completing")),
    ],
)
def test_dead_host_states_are_recognized(dead: bool, states: tuple[str, ...]) -> None:
    assert {is_dead(state) for state in states} == {dead}


def lose(paths: RunPaths, host: str, job: str) -> None:
    names = NameStore(paths.names)
    value = json.dumps({"incarnation": 1, "job": job})
    names.add(keys.lost(host), value)


def test_spares_replace_lost_hosts(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmClient, "hosts", lambda *_: [HostRow("n2", "down*", 0)])
    allocation = JobHosts(paths, 2, ("n0", "n1", "n2", "n3", "n4"), job="7.0")
    assert allocation.choose() == ("n0", "n1")
    lose(paths, "n1", "7.0.0")
    lose(paths, "n3", "6.0.0")  # in another job: it may be well again
    assert allocation.choose() == ("n0", "n3")
    lose(paths, "n4", "7.0.1")
    assert allocation.choose() == ("n0", "n3")
    lose(paths, "n0", "7.0.1")
    assert allocation.choose() is None


def test_spare_replaces_a_host_with_an_environment_failure(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are too few spares, the host whose failure is oldest is used again."""
    monkeypatch.setattr(SlurmClient, "hosts", lambda *_: [])
    allocation = JobHosts(paths, 2, ("n0", "n1", "n2"), job="7.0")
    for number, host, chosen in ((1, "n1", ("n0", "n2")), (2, "n0", ("n1", "n2"))):
        lacks = Failure(cause="environment", reason="cannot read /data", host=host)
        publish(NameStore(paths.names), number, lacks)
        blame_hosts(paths, options(paths), [number])
        assert allocation.choose() == chosen


def test_failed_connection_blames_no_host(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlurmClient, "hosts", lambda *_: [])
    refused = Failure(cause="environment", reason="refused", host="n0", echo=True)
    publish(NameStore(paths.names), 1, refused)
    blame_hosts(paths, options(paths), [1])
    assert JobHosts(paths, 2, ("n0", "n1", "n2"), job="7.0").choose() == ("n0", "n1")


class FailingTask:
    """A rollout task whose attempts all fail because of its host ``n0``."""

    def __init__(self, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
        self._paths = paths
        self._attempts = 0
        self.excluded: list[tuple[str, str]] = []
        avoid = lambda _, *given: self.excluded.append(given[-2:])  # noqa: E731
        monkeypatch.setattr(SlurmScheduler, "avoid", avoid)
        monkeypatch.setattr(SlurmClient, "hosts", lambda *_: [])

    def fail(self) -> int:
        number, self._attempts = self._attempts, self._attempts + 1
        claim = Identity("rollout", 0, number, "n0", f"{rounds.job_tag()}.0", "", 1)
        names = NameStore(self._paths.names)
        key = keys.attempt("rollout", 0, number)
        names.add(key, json.dumps(documents.to_json(claim)))
        lacks = Failure(cause="environment", reason="cannot read /data", host="n0")
        publish_attempt(names, claim, lacks)
        return 1


def test_host_is_excluded_after_two_failures_of_its_rollout_task(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = FailingTask(paths, monkeypatch)
    arguments = ["--run", str(paths.run), "--submission", "1", "--group", "rollout"]
    allocation = JobHosts(paths, 1, ("n0",), job="7.0")
    its = Rounds(parse([*arguments, "--launcher", "srun"]), paths, allocation)
    monkeypatch.setattr(its, "_round", lambda *_: task.fail())
    assert its.run() == 1
    assert task.excluded == [("n0", "cannot read /data")]


def test_spare_replaces_a_host_where_a_task_in_the_trainers_job_fails(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = FailingTask(paths, monkeypatch)
    monkeypatch.setattr(TasksInside, "_command", lambda *_: ["false"])
    allocation = JobHosts(paths, 1, ("n0", "n1"), job="7.0")
    its = Rounds(options(paths, "srun"), paths, allocation, tasks_per_host=1)
    its.tasks.start(("n0",))
    for _ in range(2):
        assert task.excluded == []
        assert its.tasks._tasks[0].child is not None
        its.tasks._tasks[0].child.wait()
        task.fail()
        its.tasks.keep(("n0",))
        assert allocation.choose() == ("n1",)
    assert task.excluded == [("n0", "cannot read /data")]
    its.tasks.end()


def test_hosts_count_as_usable_if_slurm_does_not_answer(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> list[HostRow]:
        raise SchedulerError("sinfo is not on PATH")

    monkeypatch.setattr(SlurmClient, "hosts", silent)
    allocation = JobHosts(paths, 1, ("n0", "n1"), job="7.0")
    lose(paths, "n0", "7.0.0")
    assert allocation.choose() == ("n1",)


@pytest.mark.parametrize("stubborn", [True, False])
def test_hanging_srun_is_killed_after_a_host_loss(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    """An srun that ends after TERM is not killed."""
    monkeypatch.setattr(rounds, "LOOK_S", 0.05)
    monkeypatch.setattr(rounds, "LOST_GRACE_S", 0.0)
    monkeypatch.setattr(rounds, "KILL_GRACE_S", 0.5 if stubborn else 120.0)
    trap = "trap '' TERM; " if stubborn else ""
    srun = ["sh", "-c", f"{trap}: > {paths.run}/up; for i in $(seq 600); do sleep 0.1; done"]
    monkeypatch.setattr(rounds, "agent_command", lambda *_, **__: srun)
    its = Rounds(options(paths, "srun"), paths, JobHosts(paths, 2, ("n0", "n1"), job="7.0"))
    monkeypatch.setattr(JobHosts, "lost", lambda self: {"n1"} & {_up(paths)})
    number = signal.SIGKILL if stubborn else signal.SIGTERM
    assert its._round(0, ("n0", "n1")) == 128 + number
    assert its.child is not None
    assert its.child.returncode == -number
    events = [event for event in read_all(paths) if event["kind"] == "killed"]
    assert [event["pid"] for event in events] == ([its.child.pid] if stubborn else [])


def _up(paths: RunPaths) -> str:
    """Lose the host after srun has set its trap."""
    return "n1" if (paths.run / "up").exists() else ""


def test_agent_dies_with_its_supervisor(tmp_path: Path) -> None:
    with job(tmp_path, "direct") as running:
        agent = int(running.line().split()[1])
        running.process.kill()
        running.process.wait()
        assert running.line() == ""  # the agent held the other end
        wait_until("the agent to die", lambda: not alive(agent))


@pytest.mark.parametrize("mode", [None, 0o600])
def test_job_is_requeued_with_the_reason_if_srun_cannot_start(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int | None
) -> None:
    """Set-up lines may have removed srun from PATH. The reason names srun and its setting."""
    if mode is not None:
        (tmp_path / "srun").touch(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    its = Rounds(options(paths, "srun"), paths, JobHosts(paths, 1))
    assert its.run() == 1
    assert not its.began
    why, host = its.failed_start()
    assert why.startswith("srun cannot start (")
    assert "cluster.slurm.setup" in why
    assert host == "n7"
    assert [event["why"] for event in read_all(paths) if event["kind"] == "end"] == [why]


@pytest.fixture
def tokens(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the variables file of a trial whose supervisor ``main`` runs as a link of a chain."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "other").touch()
    file = secrets / "tokens"
    file.write_text("TOKEN=1\n")
    file.chmod(0o600)
    config = load_resolved(run.config)
    cluster = config.cluster.model_copy(update={"variables_file": str(file)})
    run.config.write_text(dump(config.model_copy(update={"cluster": cluster})))
    submission(run, 2)
    monkeypatch.setattr(supervisor, "PREPARE_S", 0.0)
    monkeypatch.setattr(supervisor, "parse", lambda: options(run, "srun"))
    monkeypatch.setattr(supervisor.calls, "set_private_umask", lambda: None)
    monkeypatch.setattr(supervisor.log, "configure", lambda name: None)
    monkeypatch.setattr(supervisor, "takes_over", lambda *_: True)
    monkeypatch.setattr(supervisor, "end_chain", lambda link: None)
    return file


BREAK: dict[str, Callable[[Path], None]] = {
    "NAME=VALUE": lambda file: file.write_text("no assignment\n") and None,
    "chmod 600": lambda file: file.chmod(0o644),
    "No such file": lambda file: file.unlink(),
}


@pytest.mark.parametrize("said", BREAK)
def test_user_error_before_the_first_round_ends_the_trial(
    run: RunPaths, tokens: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Every link on every host would meet the same error, so no further link starts and no host is
    excluded.
    """
    monkeypatch.setattr(supervisor, "give_back", lambda *_: pytest.fail("a host is blamed"))
    BREAK[said](tokens)
    assert supervisor.main() == 1
    last = History(run.history).read()[-1]
    assert last.kind is Kind.FAILED
    assert said in last.data["reason"]
    kept = overview.read_overview(run)
    assert kept is not None
    assert (kept["state"], kept["reason"]) == ("FAILED", last.data["reason"])
    assert str(tokens) in last.data["reason"]


def test_user_error_does_not_end_a_trial_run_by_another_job(
    run: RunPaths, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "takes_over", lambda *_: False)
    tokens.write_text("no assignment\n")
    assert supervisor.main() == 0
    assert History(run.history).read() == []


@pytest.mark.parametrize("removed", ["before", "during"])
def test_supervisor_ends_with_a_message_if_the_history_was_removed(
    run: RunPaths,
    tokens: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    removed: str,
) -> None:
    def run_link(*_: object) -> int:
        shutil.rmtree(run.history)
        return 1 if reason_to_leave(run, 2) is None else 0

    alone = Namespace(hosts=["n0"], needed=1)
    monkeypatch.setattr(supervisor, "prepare", lambda *_: Namespace(allocation=alone))
    monkeypatch.setattr(supervisor, "run_link", run_link)
    if removed == "before":
        shutil.rmtree(run.history)
    assert supervisor.main() == 1
    message = f"this job cannot continue: {run.history} was removed or renamed"
    assert [text for text in caplog.messages if text.startswith(message)] != []


def test_configured_variables_reach_all_processes(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They override the variables that the job inherited."""
    for name in ("NCCL_DEBUG", "UCX_TLS"):  # and restored at the end
        monkeypatch.setenv(name, "of the job")
    config = load_resolved(run.config)
    cluster = config.cluster.model_copy(update={"env": {"NCCL_DEBUG": "INFO", "UCX_TLS": "rc"}})
    run.config.write_text(dump(config.model_copy(update={"cluster": cluster})))
    supervisor.prepare(options(run), run)
    assert (os.environ["NCCL_DEBUG"], os.environ["UCX_TLS"]) == ("INFO", "rc")


def test_missing_mount_of_the_variables_file_is_a_host_failure(
    run: RunPaths, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[str] = []
    monkeypatch.setattr(supervisor, "give_back", lambda link, why, host: given_back.append(why))
    shutil.rmtree(tokens.parent)
    assert supervisor.main() == 1
    assert str(tokens) in given_back[0]
    assert History(run.history).read() == []


def run_main(paths: RunPaths) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slurmrl.workers.supervisor", "--run", str(paths.run)]
    return subprocess.run(
        [*command, "--submission", "1", "--group", "trainer"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_job_of_an_ended_trial_exits_at_once(paths: RunPaths) -> None:
    end(History(paths.history), Kind.CANCELLED, {})
    done = run_main(paths)
    assert done.returncode == 0
    assert "nothing to do: the trial has ended (cancelled)" in done.stderr
    assert list(paths.names.iterdir()) == []
