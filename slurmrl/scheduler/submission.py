"""The files of ``submissions/<n>/``: requests, scripts, job ids; excluded hosts; claimants.

A process is known by an identity that is never reused: pid, start time and boot of the machine. A
process that claims a right for the trial (a submission, an extension) writes its `Claimant`.

There are three reasons to start fewer jobs of a submission:

- A group has as many tasks as planned, unless a user has set another number (``slurmrl scale``).
That number applies until the user sets another one or the plan changes.
- If the trainers are absent for too long, a task of an elastic group records this. No later task
starts until the trainers are back: until a new incarnation has begun, or one of the trainers' links
removes the record.
- A user stops a submission (``slurmrl stop``): its trainers commit, and no other job starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slurmrl import log
from slurmrl.errors import SchedulerError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import (
    COUNT,
    FILE_NAME,
    INTEGER,
    SECONDS,
    SIZE,
    TEXT,
    Fields,
    FieldType,
    shown,
)
from slurmrl.run import hosts
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.scheduler.parse import element_list

if TYPE_CHECKING:
    from slurmrl.scheduler.client import SlurmClient


SETTLE_S = 150.0
"""Seconds after which a submission without job ids, made on another host, counts as abandoned:
longer than an sbatch may take."""
CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
HEARTBEAT = FieldType(
    "from 0 to 3600 s", lambda value: SECONDS.accepts(value) and 0 <= value <= 3600
)
"""Type of the heartbeat interval, which is bounded because the status waits for it."""
REQUEST: Fields = {
    "scheduler": TEXT,
    "total_steps": INTEGER,
    "heartbeat_s": HEARTBEAT,
    "time": SECONDS,
    "signal_lead_s": SECONDS,
    "snapshot": COUNT,
    "continue": TEXT,
    "run": TEXT,
}
REQUIRED = ("scheduler", "heartbeat_s")
DIGITS = re.compile(r"[0-9]{1,9}")
"""Pattern of numbers of submissions, tasks and attempts in file names and keys."""


@dataclass(frozen=True)
class Submission:
    """One submission, from its ``request.json``."""

    number: int
    scheduler: str
    total_steps: int | None
    """Number of steps; None for a single pass, in which it depends on the dataset."""
    heartbeat_s: float
    time: float | None = None
    """Time of the request, by the clock of the submitting host."""
    signal_lead_s: float | None = None
    """Seconds before the time limit at which Slurm warns; None: unknown, or no Slurm."""
    stopped_by: str = ""
    """The user who stopped it with ``slurmrl stop``; empty if none did."""


@dataclass(frozen=True)
class ProcessId:
    pid: int
    start_ticks: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """Return the identity of a process; None if it does not exist or has ended (a zombie)."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text.rpartition(")")[2].split()  # the program's name may contain any character
        return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))

    def alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # If it is our child, reap it.
        return ProcessId.of(self.pid) == self

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def catches(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal."""
    try:
        found = CAUGHT.search(Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def boot_id() -> str:
    """Return the identity of the machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Claimant:
    """The process that wrote a claim. ``nonce`` distinguishes two claims of one process."""

    host: str
    boot: str
    pid: int
    start_ticks: int
    nonce: str

    @staticmethod
    def of_this_process() -> Claimant:
        me = ProcessId.of(os.getpid())
        assert me is not None, "this process runs"
        host, nonce = socket.gethostname(), uuid.uuid4().hex
        return Claimant(host, boot_id(), me.pid, me.start_ticks, nonce)


def is_gone(claim: Mapping[str, Any]) -> bool | None:
    """Return whether the claimant that wrote these entries has ended.

    Return None if this host cannot tell, because the claimant runs on another host.
    """
    pid, ticks = claim.get("pid"), claim.get("start_ticks")
    if claim.get("boot") == boot_id() and isinstance(pid, int) and isinstance(ticks, int):
        return not ProcessId(pid, ticks).alive()
    if claim.get("host") == socket.gethostname():
        return True  # written before this machine's boot, or by an older slurmrl
    return None


def may_submit(claim: Mapping[str, Any]) -> bool:
    """Return whether another process that wrote these entries may still submit its jobs."""
    gone = is_gone(claim)
    if gone is not None:
        return not gone and claim.get("pid") != os.getpid()
    made, known = claim.get("time"), isinstance(claim.get("host"), str)
    return known and isinstance(made, int | float) and abs(time.time() - made) < SETTLE_S


def claimant_words(claim: Mapping[str, Any]) -> str:
    """Return ``on login1, process 123``."""
    return f"on {claim.get('host')}, process {claim.get('pid')}"


logger = log.get(__name__)

NO_LONGER_PENDING = "no longer pending"
"""scontrol's message if some elements have just started; it still changes the others."""
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
JOB = FieldType("a job id", lambda value: isinstance(value, str) and bool(_JOB.fullmatch(value)))


def write_scripts(run: RunPaths, number: int, scripts: Mapping[str, str]) -> None:
    atomic.make_private_directory(run.submission(number))
    for group, text in scripts.items():
        atomic.make_private_directory(run.logs / group)
        atomic.replace(run.submission_script(number, group), text.encode())


def write_jobs(run: RunPaths, number: int, jobs: JobIds) -> None:
    """Write the first array of each group; later ones are in ``extensions``."""
    first = {group: ids[0] for group, ids in jobs.items()}
    atomic.replace(run.submission_jobs(number), json.dumps(first).encode())


def read_jobs(run: RunPaths, number: int) -> dict[str, tuple[str, ...]] | None:
    """Return the job ids by group; None if the submission ended before it wrote them.

    Raises CorruptFileError for a file that is not ours.
    """
    path = run.submission_jobs(number)
    try:
        jobs = documents.read(path)
    except FileNotFoundError:
        return None
    for group, job in jobs.items():
        if not FILE_NAME.accepts(group) or not JOB.accepts(job):
            raise corrupt(path, f"has {shown(job)} in {shown(group)}, expected {JOB.expected}")
    return {group: (job,) for group, job in jobs.items()}


def is_copied(run: RunPaths, number: int) -> bool:
    """Return whether a submission was made in another run directory, of which this one is a copy.

    Its jobs belong to the other one. A directory that was moved is no copy.
    """
    try:
        return is_another(run, documents.read(run.submission_request(number)).get("run"))
    except FileNotFoundError:
        return False


def is_another(run: RunPaths, made: object) -> bool:
    """Return whether ``made`` names another run directory, which this host sees.

    Inode numbers are compared, because a file system may be mounted at two places. A folder without
    a configuration is what processes made there after the run directory was moved.
    """
    try:
        if not isinstance(made, str) or made == "":
            return False
        there = Path(made)
        return there.stat().st_ino != run.run.stat().st_ino and RunPaths(there).config.is_file()
    except OSError:  # the other directory no longer exists
        return False


def write_environment(run: RunPaths, number: int, environ: Mapping[str, str]) -> None:
    atomic.replace(run.submission_environment(number), json.dumps(dict(environ)).encode())


def read_environment(run: RunPaths, number: int) -> dict[str, str] | None:
    """Return the variables that the jobs of a submission inherit; None without a record.

    Raises CorruptFileError.
    """
    try:
        found = documents.read(path := run.submission_environment(number))
    except FileNotFoundError:
        return None
    if any("\0" in f"{name}{value}" or not TEXT.accepts(value) for name, value in found.items()):
        raise corrupt(path, "does not hold environment variables")
    return found


def job_names(run: RunPaths, number: int) -> dict[str, str]:
    """Return the group of each job name, from the written scripts."""
    try:
        files = atomic.list_names(run.submission(number))
    except FileNotFoundError:
        return {}
    groups = [name.removesuffix(".sh") for name in files if name.endswith(".sh")]
    return {directive(run, number, group, "job-name"): group for group in groups}


def directive(run: RunPaths, number: int, group: str, name: str) -> str:
    """Return the value of a directive in a written script. Raises CorruptFileError without it."""
    found = _directive(run, number, group, name)
    if found is None:
        raise corrupt(run.submission_script(number, group), f"has no --{name}")
    return found


def excluded_by_user(run: RunPaths, number: int, group: str) -> str:
    """Return the hosts that a written script excludes; empty for none."""
    return _directive(run, number, group, "exclude") or ""


def _directive(run: RunPaths, number: int, group: str, name: str) -> str | None:
    path = run.submission_script(number, group)
    text = atomic.read_needed(path).decode(errors="replace")
    found = re.search(rf"^#SBATCH --{name}=(.+)$", text, re.MULTILINE)
    if not found:
        return None
    with documents.expecting(path):
        return shlex.split(found[1])[0]


def excluded_hosts(run: RunPaths, number: int, group: str, *more: str) -> str:
    """Return the hosts that jobs of a group exclude, in Slurm's form.

    These are the hosts that the user excludes, the hosts that the trial avoids, and ``more``.
    """
    own = excluded_by_user(run, number, group)
    avoided = [one.host for one in hosts.avoided(run)]
    return ",".join(sorted({one for one in (own, *avoided, *more) if one}))


def exclude_option(run: RunPaths, number: int, group: str) -> tuple[str, ...]:
    """Return `excluded_hosts` as an option of sbatch."""
    text = excluded_hosts(run, number, group)
    return (f"--exclude={text}",) if text else ()


def avoid_host(
    client: SlurmClient, run: RunPaths, number: int, group: str, host: str, why: str
) -> bool:
    """Avoid a host from now on, unless no job of the group could start then."""
    wanted = excluded_hosts(run, number, group, host)
    try:
        client.try_out(run.submission_script(number, group), f"--exclude={wanted}")
    except SchedulerError as error:
        logger.warning("%s is not excluded, because no job could start without it: %s", host, error)
        return False
    logger.warning("jobs of this trial exclude %s from now on: %s", host, why)
    hosts.avoid(run, host, why)
    return True


def queued_elements(tasks: list[TaskState], group: str) -> list[str]:
    """Return the pending elements of a group, as ranges of each array: ``41_[2-7]``."""
    waiting: dict[str, list[int]] = {}
    for task in tasks:
        if task.group == group and task.state is JobState.PENDING:
            waiting.setdefault(task.job_id.partition("_")[0], []).append(task.element)
    return [f"{job}_[{element_list(elements)}]" for job, elements in waiting.items()]


def exclude_from_queued(
    client: SlurmClient, run: RunPaths, number: int, group: str, tasks: list[TaskState]
) -> bool:
    """Apply the current exclusion to all queued elements of a group.

    Return False if Slurm rejects the change. Raises SchedulerError if it does not answer.
    """
    from slurmrl.scheduler.client import may_have_worked  # `status` needs no subprocess

    wanted = excluded_hosts(run, number, group)
    for elements in queued_elements(tasks, group):
        try:
            client.exclude(elements, wanted)
        except SchedulerError as error:
            if NO_LONGER_PENDING in str(error):
                continue
            if may_have_worked(error):
                raise
            logger.warning("cannot exclude %s from %s: %s", wanted or "no host", elements, error)
            return False
    return True


def newest_submission(paths: RunPaths) -> Submission | None:
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = documents.read(path, REQUEST, REQUIRED)
        except FileNotFoundError:
            continue  # the submitter has died or has not written it yet
        return Submission(
            number,
            request["scheduler"],
            request.get("total_steps"),
            request["heartbeat_s"],
            request.get("time"),
            request.get("signal_lead_s"),
            stop_requested_by(paths, number),
        )
    return None


def scheduler_of(paths: RunPaths, number: int) -> str:
    """Return the scheduler of a submission. Raises FileNotFoundError, CorruptFileError."""
    found: str = documents.read(paths.submission_request(number), REQUEST, REQUIRED)["scheduler"]
    return found


def submission_numbers(paths: RunPaths) -> list[int]:
    """Return the numbers that are in use."""
    try:
        names = atomic.list_names(paths.submissions)
    except FileNotFoundError:
        return []
    return [int(name) for name in names if DIGITS.fullmatch(name)]


_FIELDS: Fields = {"tasks": COUNT, "planned": COUNT}


def wanted_tasks(run: RunPaths, group: str, planned: int) -> int:
    """Return the wanted number of tasks; ``planned`` is the number in the plan.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        found = documents.read(run.scale(group), _FIELDS, _FIELDS)
    except FileNotFoundError:
        return planned
    tasks: int = found["tasks"]
    return tasks if found["planned"] == planned else planned


def set_wanted_tasks(run: RunPaths, group: str, tasks: int, planned: int) -> None:
    """Set the number of tasks; 0 pauses the group."""
    data = {"tasks": tasks, "planned": planned}
    atomic.replace(run.scale(group), json.dumps(data).encode())


@dataclass(frozen=True, kw_only=True)
class Orphaned:
    """Record of absent trainers: the newest incarnation and the lease of its first agent."""

    incarnation: Annotated[int, COUNT]
    attempt: Annotated[int, COUNT]
    counter: Annotated[int, SIZE] | None = None
    """Counter of the last heartbeat; None if there was none."""


def read_orphaned(run: RunPaths, group: str) -> Orphaned | None:
    """Return the record, if there is one. Raises CorruptFileError, EnvironmentFailure."""
    path = run.orphaned(group)
    try:
        return documents.from_json(Orphaned, documents.read(path), path)
    except FileNotFoundError:
        return None


def write_orphaned(run: RunPaths, group: str, seen: Orphaned) -> None:
    atomic.replace(run.orphaned(group), json.dumps(documents.to_json(seen)).encode())


def remove_orphaned(run: RunPaths, group: str) -> None:
    """Remove the record, because the trainers are back."""
    atomic.remove(run.orphaned(group))


def is_orphaned(run: RunPaths, group: str) -> bool:
    """Return whether tasks of the group have no trainers to work for.

    Raises CorruptFileError, EnvironmentFailure.
    """
    seen = read_orphaned(run, group)
    return seen is not None and seen.incarnation == fold(History(run.history).read()).incarnation


def request_stop(run: RunPaths, number: int, by: str) -> None:
    """Record that the user ``by`` wants the submission to stop. Raises EnvironmentFailure."""
    atomic.replace(run.submission_stop(number), by.encode())


def withdraw_stop(run: RunPaths, number: int) -> None:
    """Remove the request. Raises EnvironmentFailure."""
    atomic.remove(run.submission_stop(number))


def stop_requested_by(run: RunPaths, number: int) -> str:
    """Return the user who wants the submission to stop; empty without a request.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        return atomic.read(run.submission_stop(number)).decode(errors="replace") or "a user"
    except FileNotFoundError:
        return ""
