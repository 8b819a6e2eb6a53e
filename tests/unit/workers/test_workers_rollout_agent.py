"""The agent of a rollout task, with a scripted worker in a separate process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from slurmrl.config.load import dump, load_resolved
from slurmrl.config.schema.rollout import Tasks
from slurmrl.errors import EnvironmentFailure, ReportedError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run import events, keys
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.history.slots import Kind
from slurmrl.run.history.state import begin, end
from slurmrl.run.lease import Lease, LeaseObserver
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure, Identity, Warned
from slurmrl.scheduler.submission import Orphaned, is_orphaned, write_orphaned
from slurmrl.watch import published
from slurmrl.workers import child_process
from slurmrl.workers.agent import __main__ as agent_module
from slurmrl.workers.agent.__main__ import FAILED, OK, Agent
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.rollout_task import FOLDER_GONE_S, RolloutTask, time_to_retire_s
from tests.support.replaced import needs_root, replace

REPOSITORY = Path(__file__).parents[3]
STUB = """
import json, os, sys
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.worker import fork_server
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
line = Connection.from_fd(int(option("--pipe-fd")))
forked = fork_server.serve(line, int(option("--stacks-fd")))
if forked is None:
    sys.exit(0)
pipe = forked.pipe
while (message := pipe.receive(60)) is not None:
    if message["type"] == "start":
        pipe.send({"type": "ready", "rank": 0, "size": 0, "fingerprint": ""})
    with open(os.environ["STUB_HEARD"], "a") as heard:
        heard.write(json.dumps({"pid": os.getpid(), **message}) + "\\n")
    if message["type"] == "retire" and not os.environ.get("STUB_STAYS"):
        break
"""
ORPHAN_S = 300.0
TTL_S = 60.0
Story: TypeAlias = Iterator[None]


class Bed:
    """An attempt at task 0 in this process, and the messages to its worker."""

    def __init__(self, run: RunPaths, heard: Path) -> None:
        self.paths = run
        self.now = 0.0
        self.host = Host(run, 1, "rollout")
        self.story: Story = iter(())
        self._heard = heard
        self._lease = Lease(run.lease("trainer", 0, 0))
        """Of the trainers' first agent, which is there before they begin."""

    def run(self, story: Story) -> int:
        self.story = story
        code = Agent(self.host).run()
        with pytest.raises(StopIteration):
            next(story)
        return code

    def run_until_exit(self, story: Story) -> int:
        """Run the agent, which exits by itself after the story."""
        self.story = chain(story, self.until(lambda: False))
        return Agent(self.host).run()

    def begin(self, job: str, attempt: int) -> None:
        """Let the trainers of a job begin an incarnation."""
        identity = Identity("trainer", 0, attempt, "n0", job, "41_0", 1)
        names = NameStore(self.paths.names)
        said = json.dumps(documents.to_json(identity))
        names.add(keys.attempt("trainer", 0, attempt), said)
        self._lease = Lease(self.paths.lease("trainer", 0, attempt))
        begin(self.host.history, {"job": job})

    def serving(self) -> Story:
        """Let the trainers begin, and wait until the worker serves them."""
        yield from self.until_heard("start")
        self.begin("41.0.0", 0)
        yield from self.until_heard("serve")

    def passes(self, seconds: float, *, beats: bool) -> Story:
        """Advance the time while the trainers are alive, or are gone."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + TTL_S / 8, until)
            if beats:
                self._lease.beat()
            yield

    def heard(self, kind: str) -> list[dict[str, Any]]:
        lines = self._heard.read_text().splitlines() if self._heard.exists() else []
        return [said for said in map(json.loads, lines) if said["type"] == kind]

    def until_heard(self, kind: str, count: int = 1) -> Story:
        """Wait until the worker has this many messages of a kind. The time advances, except for
        ``retire``.
        """
        tick_s = 0.0 if kind == "retire" else self.host.intervals.check_s
        return self.until(lambda: len(self.heard(kind)) >= count, tick_s)

    def until(self, there: Callable[[], object], tick_s: float = 2.0) -> Story:
        deadline = time.monotonic() + 60
        while not there():
            assert time.monotonic() < deadline
            self.now += tick_s
            self._lease.beat()
            yield

    def worker(self) -> int:
        return int(self.heard("start")[0]["pid"])

    def reason(self) -> str:
        """Return why the attempt failed."""
        (failure,) = self.told("failure")
        return str(failure["reason"])

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events.read_all(self.paths) if event["kind"] == kind]


@pytest.fixture
def bed(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_handlers: None
) -> Iterator[Bed]:
    plan = Plan.read(run.plan)
    change = {"name": "rollout", "elastic": True, "workers_per_host": 1, "gpus_per_worker": 0}
    groups = (*plan.groups, plan.trainers.model_copy(update=change))
    run.plan.write_text(plan.model_copy(update={"groups": groups}).to_json())
    config = load_resolved(run.config)
    rollout = config.rollout.model_copy(update={"tasks": Tasks(orphan_s=ORPHAN_S)})
    run.config.write_text(dump(config.model_copy(update={"rollout": rollout})))
    (tmp_path / "stub_worker.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    monkeypatch.setenv("STUB_HEARD", str(tmp_path / "heard"))
    monkeypatch.setattr(Agent, "_take_log", lambda agent: None)
    spawn = child_process.spawn_with_pipe

    def spawn_stub(
        name: str, module: str, arguments: list[str], **more: Any
    ) -> tuple[child_process.Child, Connection]:
        assert module == "slurmrl.workers.worker"
        return spawn(name, "stub_worker", arguments, **more)

    monkeypatch.setattr(child_process, "spawn_with_pipe", spawn_stub)
    found = Bed(run, tmp_path / "heard")

    class Scripted(RolloutTask):
        """An agent that runs one part of a script in each turn."""

        def __init__(self, host: Host, *, orphan_s: float) -> None:
            super().__init__(host, orphan_s=orphan_s, clock=lambda: found.now)

        def turn(self, timeout_s: float) -> None:
            next(found.story, None)
            super().turn(0.02)

    monkeypatch.setattr(agent_module, "RolloutTask", Scripted)
    yield found
    assert list(run.control.iterdir()) == [], "the channel of an incarnation is not its own"


def test_task_worker_serves_consecutive_incarnations(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers incarnations of other jobs and a history that is unreadable for a while."""

    def story() -> Story:
        yield from bed.serving()
        with monkeypatch.context() as silent:
            looks = []

            def unreadable() -> None:
                looks.append(bed.now)
                raise EnvironmentFailure("the directory does not answer")

            silent.setattr(bed.host.history, "read", unreadable)
            yield from bed.until(lambda: len(looks) > 2)
        bed.begin("42.0.0", 1)
        yield from bed.until_heard("serve", 2)
        end(bed.host.history, Kind.FINISHED, {})

    assert bed.run_until_exit(story()) == OK
    (start,) = bed.heard("start")
    assert (start["agent"]["group"], start["agent"]["attempt"]) == ("rollout", 0)
    assert bed.paths.rollout_task("rollout", 0, 0).is_dir()
    serves = bed.heard("serve")
    assert [serve["incarnation"] for serve in serves] == [1, 2]
    assert {serve["pid"] for serve in serves} == {start["pid"]}
    assert not process_runs(start["pid"])


def process_runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_warning_retires_the_task(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task retires within the remaining time."""
    monkeypatch.setattr(bed.host.warnings, "_local", False)
    monkeypatch.setenv("SLURMRL_JOB_END", str(time.time() + 100))

    def story() -> Story:
        yield from bed.until_heard("start")
        os.kill(os.getpid(), signal.SIGUSR2)
        yield from bed.until_heard("retire")

    assert bed.run(story()) == OK
    (retire,) = bed.heard("retire")
    assert retire["reason"] == "its job will end (time_limit)"
    assert 60 < retire["within_s"] < 100


def test_worker_that_does_not_retire_in_time_is_killed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_STAYS", "1")
    left: list[bool] = []

    def story() -> Story:
        yield from bed.until_heard("start")
        os.kill(os.getpid(), signal.SIGTERM)
        yield from bed.until_heard("retire")
        within_s = bed.heard("retire")[0]["within_s"]
        yield from bed.passes(within_s - 1, beats=False)
        left.append(process_runs(bed.worker()))
        yield from bed.passes(2, beats=False)

    assert bed.run(story()) == FAILED
    assert left == [True]
    assert not process_runs(bed.worker())


def test_task_exits_if_trainers_do_not_return(bed: Bed) -> None:
    """The task exits after the limit by its own clock. If trainers of another job return, it
    continues.
    """

    def story() -> Story:
        yield from bed.serving()
        yield from bed.passes(2 * ORPHAN_S, beats=True)
        yield from bed.passes(ORPHAN_S - TTL_S, beats=False)
        bed.begin("42.0.0", 1)
        yield from bed.until_heard("serve", 2)
        yield from bed.passes(2 * ORPHAN_S, beats=True)
        yield from bed.passes(ORPHAN_S - TTL_S, beats=False)
        assert bed.heard("retire") == []
        bound = bed.now + 2 * TTL_S
        while not bed.told("retire"):
            yield from bed.passes(1.0, beats=False)
        assert bed.now <= bound
        yield from bed.until_heard("retire")

    assert bed.run(story()) == OK
    (retire,) = bed.heard("retire")
    assert retire["reason"].startswith("the trainers have been gone for")
    assert is_orphaned(bed.paths, "rollout")


def test_task_does_not_wait_again_for_absent_trainers(bed: Bed) -> None:
    """The task ends before its worker starts, unless a heartbeat or an incarnation has occurred."""
    bed.begin("41.0.0", 0)
    lease = Lease(bed.paths.lease("trainer", 0, 0))
    lease.beat()
    counter = LeaseObserver(bed.paths.lease("trainer", 0, 0)).observe().counter
    seen = Orphaned(incarnation=1, attempt=0, counter=counter)
    write_orphaned(bed.paths, "rollout", seen)
    assert bed.run(iter(())) == OK
    assert (bed.heard("start"), len(bed.told("retire"))) == ([], 1)
    task = RolloutTask(bed.host, orphan_s=ORPHAN_S)
    assert task._is_orphaned()
    assert not RolloutTask(bed.host, orphan_s=math.inf)._is_orphaned(), "it ends with its job"
    lease.beat()
    assert not task._is_orphaned()
    bed.begin("42.0.0", 1)
    assert not task._is_orphaned()


@pytest.mark.parametrize("inside", [False, True])
def test_gpu_failure_excludes_the_host_unless_trainers_run_there(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    def run(task: RolloutTask) -> None:
        raise ReportedError(Failure(cause=Cause.GPU_FAULT, reason="ECC"))

    monkeypatch.setattr(RolloutTask, "run", run)
    bed.host.inside = inside
    names = NameStore(bed.paths.names)
    assert bed.run(iter(())) == FAILED
    assert (published.lost(names, bed.host.identity.host) is None) == inside


def test_dead_worker_fails_only_its_task(bed: Bed) -> None:
    def story() -> Story:
        yield from bed.serving()
        os.kill(bed.worker(), signal.SIGKILL)

    assert bed.run_until_exit(story()) == FAILED
    assert bed.reason().endswith("was ended by SIGKILL")
    assert [record.kind for record in bed.host.history.read()] == [Kind.BEGIN]
    assert keys.failure(1) not in bed.host.names.find_subtree("incarnation")
    names = NameStore(bed.paths.names)
    told = published.attempt_failure(names, "rollout", 0, 0)
    assert told is not None
    assert (told.reason, told.world) == (bed.reason(), "rollout/0")


@pytest.mark.parametrize("inside", [False, True])
def test_dismissed_task_is_restarted_only_in_the_trainers_job(bed: Bed, inside: bool) -> None:
    """In the trainers' job, the master dismisses only tasks that it counts as lost."""

    def story() -> Story:
        yield from bed.until_heard("start")
        bed.host.inside = inside
        (slot,) = bed.host.children.slots
        assert slot.pipe is not None
        slot.pipe.send({"type": "retire"})  # as if the worker had read ``Leave``
        yield from bed.until_heard("retire")

    assert bed.run(story()) == (FAILED if inside else OK)
    if not inside:
        assert bed.told("retire") == bed.told("failure") == []
        return
    assert bed.reason().endswith("rollout task: the master told it to exit")


def test_task_exits_if_the_master_removed_its_directory(bed: Bed) -> None:
    """A suspended task that the master has lost exits.

    A directory that is moved only briefly is awaited.
    """
    folder = bed.paths.rollout_task("rollout", 0, 0)
    aside = bed.paths.run / "aside"

    def story() -> Story:
        yield from bed.serving()
        folder.rename(aside)
        yield from bed.passes(FOLDER_GONE_S / 2, beats=True)
        aside.rename(folder)
        yield from bed.passes(2 * FOLDER_GONE_S, beats=True)
        shutil.rmtree(folder)

    assert bed.run_until_exit(story()) == FAILED
    assert not process_runs(bed.worker())
    assert bed.reason().endswith(f"rollout task: {folder} was removed or replaced")


@pytest.mark.parametrize("name", ["results", "00000001.requests"])
def test_task_exits_if_the_log_of_its_attempt_was_removed(bed: Bed, name: str) -> None:
    """A log that was not made yet does not count as removed."""
    folder = bed.paths.rollout_task("rollout", 0, 0)

    def story() -> Story:
        yield from bed.serving()
        yield from bed.passes(2 * FOLDER_GONE_S, beats=True)
        (folder / name).touch()
        yield from bed.passes(2 * FOLDER_GONE_S, beats=True)
        (folder / name).unlink()
        yield from bed.passes(FOLDER_GONE_S / 2, beats=True)
        assert bed.told("failure") == []

    assert bed.run_until_exit(story()) == FAILED
    assert not process_runs(bed.worker())
    assert bed.reason().endswith(f"rollout task: {folder / name} was removed or replaced")


REPLACED = [
    *(("results", kind) for kind in ("folder", "link", "foreign")),
    ("00000001.requests", "fifo"),
    *(("samples", kind) for kind in ("file", "link")),
    *((".", kind) for kind in ("file", "link")),
]


@pytest.mark.parametrize(("name", "kind"), REPLACED)
def test_task_exits_if_its_files_were_replaced(bed: Bed, name: str, kind: str) -> None:
    """Its worker can neither read nor write its files."""
    if needs_root(kind) and os.geteuid() != 0:
        pytest.skip("only root may give a file away")
    folder = bed.paths.rollout_task("rollout", 0, 0)

    def story() -> Story:
        yield from bed.until_heard("start")
        (folder / "samples").mkdir()
        for log in ("results", "00000001.requests"):
            (folder / log).touch()
        bed.begin("41.0.0", 0)
        yield from bed.until_heard("serve")
        yield from bed.passes(2 * FOLDER_GONE_S, beats=True)
        replace(folder / name, kind)

    assert bed.run_until_exit(story()) == FAILED
    assert bed.reason().endswith(f"rollout task: {folder / name} was removed or replaced")


def test_task_continues_if_an_older_incarnation_log_was_removed(bed: Bed) -> None:
    log = bed.paths.rollout_requests("rollout", 0, 0, 1)

    def story() -> Story:
        yield from bed.serving()
        log.touch()
        yield from bed.passes(FOLDER_GONE_S, beats=True)
        bed.begin("42.0.0", 1)
        yield from bed.until_heard("serve", 2)
        log.unlink()
        yield from bed.passes(3 * FOLDER_GONE_S, beats=True)
        end(bed.host.history, Kind.FINISHED, {})

    assert bed.run_until_exit(story()) == OK


def test_task_exits_after_a_newer_submission(bed: Bed) -> None:
    def story() -> Story:
        yield from bed.until_heard("start")
        newer = bed.paths.submission_request(2)
        newer.parent.mkdir()
        newer.write_text(json.dumps({"scheduler": "slurm", "heartbeat_s": 2.0}))
        bed.begin("51.0.0", 0)

    assert bed.run_until_exit(story()) == OK
    assert bed.heard("serve") == []


@pytest.mark.parametrize(
    ("cause", "left_s", "within_s"),
    [
        ("time_limit", 120.0, 110.0),
        ("time_limit", -1.0, 20.0),  # Slurm has sent TERM
        ("preemption", 80_000.0, 20.0),
        ("interrupt", None, 20.0),
    ],
)
def test_time_to_retire_follows_cause_and_remaining_time(
    cause: str, left_s: float | None, within_s: float
) -> None:
    assert time_to_retire_s(Warned(cause=cause, time_left_s=left_s)) == within_s
