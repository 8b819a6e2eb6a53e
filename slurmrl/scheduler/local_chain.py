"""The local scheduler and its chains. A chain is a process that runs the links of one group.

``python -m slurmrl.scheduler.local_chain RUN_DIR NUMBER GROUP LINKS WIDTH`` replaces Slurm's
``--array=0-L%W`` on one machine, in its own session. The links of a fixed group run one after the
other. In an elastic group, W tasks run at once, or the number that a user has set. Each link runs
the batch script. After a link ends, the next link starts, unless the trial has ended. Only the
chain writes its state file.

After any signal, the chain starts no other link. USR1 lets the running links continue. The chain
forwards USR2 (stop after a step) to each link that has a handler. TERM ends the links with TERM,
and after 10 s with KILL. QUIT kills the links at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from slurmrl import log
from slurmrl.child import DieWithParent
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SchedulerError, UsageError
from slurmrl.fsio import atomic, calls, documents
from slurmrl.fsio.documents import COUNT, TEXT, Fields, list_of, one_of, table
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler import base, batch_script, submission
from slurmrl.scheduler.base import (
    GroupRequest,
    JobIds,
    JobState,
    Scheduler,
    SubmissionRequest,
    TaskState,
)
from slurmrl.scheduler.states import forgotten
from slurmrl.scheduler.submission import ProcessId, is_orphaned, wanted_tasks

_log = log.get(__name__)
GRACE_S = 10.0
"""Seconds from TERM to KILL."""
PREFIX = "local"
_NUMBER = re.compile(r"[0-9]{1,20}")
WAIT_S = 5.0
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)
"""Signals that a chain blocks from its start and receives one at a time."""
_ELEMENT: Fields = {"state": one_of(*JobState), "reason": TEXT, "pid": COUNT}
_FIELDS: Fields = {
    "job": TEXT,
    "host": TEXT,
    "boot": TEXT,
    "elements": list_of(table(_ELEMENT, ("state", "reason"))),
}


@dataclass
class Element:
    state: JobState
    reason: str = ""
    pid: int | None = None
    """Id of a running element's process. The process leads its own process group."""


@dataclass
class ChainState:
    job: str
    host: str
    boot: str
    elements: list[Element] = field(default_factory=list)

    @staticmethod
    def of(process: ProcessId, links: int) -> ChainState:
        """Return the initial state of a chain that this process runs on this machine."""
        pending = [Element(JobState.PENDING, "waits for the previous link") for _ in range(links)]
        return ChainState(job_id(process), socket.gethostname(), submission.boot_id(), pending)

    @property
    def elsewhere(self) -> bool:
        """Whether the chain runs on another machine."""
        return self.boot != submission.boot_id() and self.host != socket.gethostname()

    @property
    def active(self) -> bool:
        return any(element.state.active for element in self.elements)

    def write(self, path: Path) -> None:
        atomic.replace(path, json.dumps(asdict(self)).encode(), durable=False)

    @staticmethod
    def read(path: Path) -> ChainState | None:
        """Return the state; None if the chain has not written it yet. Raises CorruptFileError."""
        try:
            values = documents.read(path, _FIELDS, _FIELDS)
        except FileNotFoundError:
            return None
        elements = [
            Element(JobState(element["state"]), element["reason"], element.get("pid"))
            for element in values["elements"]
        ]
        return ChainState(values["job"], values["host"], values["boot"], elements)

    def after_sudden_end(self) -> ChainState:
        """Return the state of a chain whose process was killed before it could write its end."""
        reason = "the local chain was killed, or the machine restarted"
        ends = {JobState.RUNNING: JobState.FAILED, JobState.PENDING: JobState.CANCELLED}
        elements = [
            replace(element, state=ends[element.state], reason=reason, pid=None)
            if element.state.active
            else element
            for element in self.elements
        ]
        return replace(self, elements=elements)

    def tasks(self, group: str) -> list[TaskState]:
        return [
            TaskState(
                job_id=f"{self.job}_{index}",
                group=group,
                element=index,
                state=element.state,
                raw=element.state.value,
                reason=element.reason,
                hosts=(self.host,) if element.state is JobState.RUNNING else (),
            )
            for index, element in enumerate(self.elements)
        ]


def job_id(process: ProcessId) -> str:
    """Return the name of the chain that a process runs."""
    return f"{PREFIX}-{process.pid}-{process.start_ticks}"


def chain_process(job: str) -> ProcessId:
    """Return the process of a chain. Raises CorruptFileError for another scheduler's job id."""
    prefix, *numbers = job.split("-")
    if prefix != PREFIX or len(numbers) != 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise CorruptFileError(f"{job!r} is not a job id of the local scheduler")
    return ProcessId(int(numbers[0]), int(numbers[1]))


class LocalChain:
    """Runs the links of one group of one submission."""

    def __init__(self, run: RunPaths, number: int, group: str, links: int, width: int) -> None:
        identity = submission.ProcessId.of(os.getpid())
        assert identity is not None, "this process runs"
        self._run, self._number, self._group = run, number, group
        self._width = width
        self._state = ChainState.of(identity, links)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        """Mapping from the index of each running link to its process."""
        self._last = False
        self._relay: set[int] = set()
        """Indices of the links to which USR2 must still be forwarded."""
        self._kill_at_s: float | None = None

    def run(self) -> None:
        self._write()
        following = 0
        while True:
            while (
                following < len(self._state.elements)
                and not self._signalled()
                and len(self._running) < self._at_once()
                and not self._trial_ended()
            ):
                self._begin(following)
                following += 1
            if not self._running and not self._pauses(following):
                break
            for index in self._wait():
                self._end(index)
        for element in self._state.elements:
            if element.state is JobState.PENDING:
                element.state, element.reason = JobState.CANCELLED, "not needed"
        self._write()

    def _signalled(self) -> bool:
        """Return whether a signal has arrived, even if the chain has not received it yet."""
        return self._last or bool(signal.sigpending() & (set(SIGNALS) - {signal.SIGCHLD}))

    def _at_once(self) -> int:
        """Return the number of links that may run now, which is 0 for tasks without trainers."""
        try:
            if is_orphaned(self._run, self._group):
                return 0
            return wanted_tasks(self._run, self._group, self._width)
        except (CorruptFileError, EnvironmentFailure) as error:
            _log.warning("cannot read the wanted number of tasks, using the planned one: %s", error)
            return self._width

    def _pauses(self, following: int) -> bool:
        """Return whether the chain waits without a running link until tasks are wanted again.

        The chain waits while the trainers run.
        """
        if following >= len(self._state.elements) or self._at_once() > 0:
            return False
        if self._signalled() or self._trial_ended():
            return False
        trainers = ChainState.read(self._run.local_chain(self._number, TRAINERS))
        return trainers is None or (trainers.active and chain_process(trainers.job).alive())

    def _trial_ended(self) -> bool:
        try:
            return fold(History(self._run.history).read()).end is not None
        except CorruptFileError as error:
            _log.error("no other link starts: %s", error)
            return True

    def _begin(self, index: int) -> None:
        child = self._running[index] = self._start(index)
        element = self._state.elements[index]
        element.state, element.reason, element.pid = JobState.RUNNING, "", child.pid
        self._write()

    def _end(self, index: int) -> None:
        """Kill the remaining processes of an ended link, as Slurm does.

        Reap the link's process last, so that no other process can get its process group id.
        """
        child = self._running.pop(index)
        self._relay.discard(index)
        _kill_group(child.pid)
        element = self._state.elements[index]
        element.state, element.reason = self._verdict(child.wait())
        element.pid = None
        self._write()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        name = f"{self._state.job}_{index}"
        environ = os.environ | {
            "SLURM_JOB_ID": name,
            "SLURM_ARRAY_JOB_ID": self._state.job,
            "SLURM_ARRAY_TASK_ID": str(index),
        }
        environ.pop("PYTHONPATH", None)  # The batch script sets the link's PYTHONPATH.
        with self._run.batch_log(self._group, name).open("ab") as output:
            return subprocess.Popen(
                ["/bin/bash", str(self._run.submission_script(self._number, self._group))],
                cwd=self._run.run,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=DieWithParent(),
            )

    def _wait(self) -> list[int]:
        """Handle at most one signal. Return the indices of links that have ended."""
        for index in sorted(self._relay):
            if submission.catches(self._running[index].pid, signal.SIGUSR2):
                self._running[index].send_signal(signal.SIGUSR2)
                self._relay.discard(index)
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            for child in self._running.values():
                _kill_group(child.pid)
        done = self._ended()
        if not done:
            busy = bool(self._relay) or self._kill_at_s is not None
            received = signal.sigtimedwait(SIGNALS, 0.05 if busy else WAIT_S)
            # After a suspension of this process, Python may return an undefined signal number.
            if received is not None and received.si_signo in SIGNALS:
                self._receive(received.si_signo)
        return done

    def _ended(self) -> list[int]:
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return [
            index
            for index, child in self._running.items()
            if os.waitid(os.P_PID, child.pid, ended) is not None
        ]

    def _receive(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        _log.info("received %s", signal.Signals(number).name)
        self._last = True
        if number == signal.SIGUSR2:
            self._relay = set(self._running)
        elif number == signal.SIGQUIT:
            self._kill_at_s = time.monotonic()
        elif number in (signal.SIGTERM, signal.SIGINT) and self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + GRACE_S
            for child in self._running.values():
                child.terminate()

    def _verdict(self, code: int) -> tuple[JobState, str]:
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self._kill_at_s is not None:
            return JobState.CANCELLED, reason
        return (JobState.COMPLETED, "") if code == 0 else (JobState.FAILED, reason)

    def _write(self) -> None:
        try:
            self._state.write(self._run.local_chain(self._number, self._group))
        except EnvironmentFailure as error:  # A full disk must not end the chain.
            _log.warning("cannot write the state of the chain: %s", error)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    run, number, group, links, width = arguments
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir(run)
    calls.set_private_umask()
    log.configure(f"{group} chain")
    LocalChain(RunPaths(Path(run)), int(number), group, int(links), int(width)).run()


CHAIN = "slurmrl.scheduler.local_chain"


class LocalScheduler(Scheduler):
    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        """State file of each job that this object has submitted or recovered."""

    def check(self) -> None:
        if not Path("/proc/self/stat").exists() or not Path("/bin/bash").exists():
            raise EnvironmentFailure("the local scheduler needs Linux with /proc and /bin/bash")

    def scripts(self, request: SubmissionRequest) -> dict[str, str]:
        return {
            group.name: batch_script.script(request, group, "direct") for group in request.groups
        }

    def submit(self, request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        for group in request.groups:
            if group.hosts > 1 and not group.elastic:
                raise SchedulerError(
                    f"group {group.name} requests {group.hosts} hosts; the local scheduler has one"
                )
        submission.write_scripts(request.run, request.number, self.scripts(request))
        jobs: dict[str, tuple[str, ...]] = {}
        for group in reversed(request.groups):  # Trainers start last: without tasks, they hang.
            jobs = {group.name: (self._start(request, group),), **jobs}
        submission.write_jobs(request.run, request.number, jobs)
        return jobs

    def extend(self, run: RunPaths, number: int, group: str, *, by: str) -> str:
        raise UsageError("a local chain cannot be extended: run slurmrl resume when it has ended")

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        if submission.is_copied(run, number):
            return {}
        jobs = submission.read_jobs(run, number)
        if jobs is None:
            groups = submission.job_names(run, number).values()
            states = {group: ChainState.read(run.local_chain(number, group)) for group in groups}
            jobs = {group: (state.job,) for group, state in states.items() if state is not None}
        for group, job in _each(jobs):
            self._files[job] = run.local_chain(number, group)
        return jobs

    def query(self, jobs: JobIds) -> list[TaskState]:
        return [task for group, job in _each(jobs) for task in self._tasks(group, job)]

    def cancel(self, jobs: JobIds, *, spare: str = "") -> None:
        for group, job in _each(jobs):
            keeps = any(
                task.job_id == spare and task.state is JobState.RUNNING
                for task in self._tasks(group, job)
            )
            self._signal(job, signal.SIGUSR1 if keeps else signal.SIGTERM)

    def interrupt(self, jobs: JobIds) -> None:
        for _, job in _each(jobs):
            self._signal(job, signal.SIGUSR2)

    def kill(self, jobs: JobIds) -> None:
        for _, job in _each(jobs):
            self._signal(job, signal.SIGQUIT)

    def _start(self, request: SubmissionRequest, group: GroupRequest) -> str:
        run = request.run
        width = group.hosts if group.elastic else 1
        arguments = [str(run.run), str(request.number), group.name, str(group.links), str(width)]
        output = run.batch_log(group.name, f"chain.{request.number}")
        # With -P, the working directory cannot shadow the code snapshot.
        pid = os.posix_spawn(
            request.python,
            [request.python, "-P", "-m", CHAIN, *arguments],
            base.local_environment(os.environ) | base.snapshot_environment(request.code),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=SIGNALS,
        )
        process = submission.ProcessId.of(pid)
        if process is None:
            raise SchedulerError(f"the local chain of {group.name} ended at once: see {output}")
        job = job_id(process)
        self._files[job] = run.local_chain(request.number, group.name)
        return job

    def _tasks(self, group: str, job: str) -> list[TaskState]:
        """Return the elements of a job.

        The states of a chain on another machine come only from its state file.
        """
        alive = chain_process(job).alive()
        state = self._state(job)
        if state is None:
            return [_starting(group, job) if alive else forgotten(group, job)]
        if alive or state.elsewhere:
            return state.tasks(group)
        return state.after_sudden_end().tasks(group)

    def _signal(self, job: str, number: signal.Signals) -> None:
        state = self._state(job)
        if state is not None and state.elsewhere and state.active:
            raise SchedulerError(f"job {job} runs on {state.host}: run the command there")
        chain_process(job).send(number)

    def _state(self, job: str) -> ChainState | None:
        file = self._files.get(job) or _file_of(chain_process(job))
        state = ChainState.read(file) if file else None
        return state if state is not None and state.job == job else None


def _each(jobs: JobIds) -> Iterator[tuple[str, str]]:
    return ((group, job) for group, ids in jobs.items() for job in ids)


def _file_of(process: submission.ProcessId) -> Path | None:
    """Return the state file that a chain's command line names; None if no chain runs there."""
    try:
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if CHAIN not in words or not process.alive():
        return None
    run, number, group = words[words.index(CHAIN) + 1 :][:3]
    return RunPaths(Path(run)).local_chain(int(number), group)


def _starting(group: str, job: str) -> TaskState:
    state = JobState.PENDING
    return TaskState(f"{job}_0", group, 0, state, state.value, "the local chain is starting", ())


if __name__ == "__main__":
    main(sys.argv[1:])
