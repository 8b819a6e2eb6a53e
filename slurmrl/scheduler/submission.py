"""The files of ``submissions/<n>/`` (requests, scripts, job ids), excluded hosts and claimants.

Pid, start time and boot of the machine identify a process uniquely. A process that claims a right
for the trial (a submission, an extension) writes its `Claimant`.

Three records change the number of jobs that start:

- ``slurmrl scale`` sets the number of tasks of a group. This number replaces the planned number
  until the user sets another number or the plan changes.
- If the trainers are missing for too long, a task of an elastic group writes `Orphaned`. Later
  tasks do not start until an incarnation begins or a link of the trainers removes the record.
- ``slurmrl stop`` stops a submission. The trainers commit, and no other job starts.
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
from collections.abc import Iterable, Mapping
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
"""Seconds after which a submission without job ids on another host counts as abandoned. sbatch has
timed out by then."""
CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
HEARTBEAT = FieldType(
    "from 0 to 3600 s", lambda value: SECONDS.accepts(value) and 0 <= value <= 3600
)
"""Type of the heartbeat interval, which is bounded because ``slurmrl status`` waits for it."""
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
    """Number of steps; None for a single pass, because its steps depend on the dataset."""
    heartbeat_s: float
    time: float | None = None
    """Time of the request in seconds since the epoch, by the clock of the submitting host."""
    signal_lead_s: float | None = None
    """Seconds between Slurm's warning and the time limit; None if unknown and without Slurm."""
    stopped_by: str = ""
    """Name of the user who stopped the submission with ``slurmrl stop``; empty if nobody did."""


@dataclass(frozen=True)
class ProcessId:
    pid: int
    start_ticks: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    @staticmethod
    def of(pid: int) -> ProcessId | None:
        """Return the identity of a process; None if the process does not exist or is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The program's name, in parentheses, may contain any character.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))

    def alive(self) -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # A child that has ended must be reaped.
        return ProcessId.of(self.pid) == self

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has installed a handler for a signal."""
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

    Return None if the claimant ran on another host, whose processes this host cannot see.
    """
    pid, ticks = claim.get("pid"), claim.get("start_ticks")
    if claim.get("boot") == boot_id() and isinstance(pid, int) and isinstance(ticks, int):
        return not ProcessId(pid, ticks).alive()
    if claim.get("host") == socket.gethostname():
        return True  # The claim is older than this boot, or an older slurmrl wrote it.
    return None


def may_submit(claim: Mapping[str, Any]) -> bool:
    """Return whether the claimant is another process that may still submit its jobs."""
    gone = is_gone(claim)
    if gone is not None:
        return not gone and claim.get("pid") != os.getpid()
    made, known = claim.get("time"), isinstance(claim.get("host"), str)
    return known and isinstance(made, int | float) and abs(time.time() - made) < SETTLE_S


def claimant_words(claim: Mapping[str, Any]) -> str:
    """Return a description of the claimant, such as ``on login1, process 123``."""
    return f"on {claim.get('host')}, process {claim.get('pid')}"


logger = log.get(__name__)

NO_LONGER_PENDING = "no longer pending"
"""scontrol's message if some elements have just started. scontrol changes the other elements."""
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
JOB = FieldType("a job id", lambda value: isinstance(value, str) and bool(_JOB.fullmatch(value)))


def write_scripts(run: RunPaths, number: int, scripts: Mapping[str, str]) -> None:
    atomic.make_private_directory(run.submission(number))
    for group, text in scripts.items():
        atomic.make_private_directory(run.logs / group)
        atomic.replace(run.submission_script(number, group), text.encode())


def write_jobs(run: RunPaths, number: int, jobs: JobIds) -> None:
    """Write the job id of each group's first array. `extensions` records later arrays."""
    first = {group: ids[0] for group, ids in jobs.items()}
    atomic.replace(run.submission_jobs(number), json.dumps(first).encode())


def read_jobs(run: RunPaths, number: int) -> dict[str, tuple[str, ...]] | None:
    """Return the job ids by group; None if the submitting process ended before it wrote them.

    Raises CorruptFileError for a file that slurmrl cannot have written.
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
    """Return whether this run directory is a copy of the directory that made a submission.

    The jobs then belong to the original directory. A moved directory does not count as a copy.
    """
    try:
        return is_another(run, documents.read(run.submission_request(number)).get("run"))
    except FileNotFoundError:
        return False


def is_another(run: RunPaths, made: object) -> bool:
    """Return whether ``made`` is the path of another run directory that this host sees.

    Compare inode numbers, because a file system may be mounted at two places. A folder without a
    configuration does not count, because processes may create it after the run directory was moved.
    """
    try:
        if not isinstance(made, str) or made == "":
            return False
        there = Path(made)
        return there.stat().st_ino != run.run.stat().st_ino and RunPaths(there).config.is_file()
    except OSError:  # The other directory no longer exists.
        return False


def write_environment(run: RunPaths, number: int, environ: Mapping[str, str]) -> None:
    atomic.replace(run.submission_environment(number), json.dumps(dict(environ)).encode())


def read_environment(run: RunPaths, number: int) -> dict[str, str] | None:
    """Return the variables that the jobs of a submission inherit; None if none are recorded.

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
    """Return the group of each job name, from the submission's scripts."""
    try:
        files = atomic.list_names(run.submission(number))
    except FileNotFoundError:
        return {}
    groups = [name.removesuffix(".sh") for name in files if name.endswith(".sh")]
    return {directive(run, number, group, "job-name"): group for group in groups}


def directive(run: RunPaths, number: int, group: str, name: str) -> str:
    """Return the value of a directive in a group's script. Raises CorruptFileError if missing."""
    found = _directive(run, number, group, name)
    if found is None:
        raise corrupt(run.submission_script(number, group), f"has no --{name}")
    return found


def excluded_by_user(run: RunPaths, number: int, group: str) -> str:
    """Return the hosts that a group's script excludes, in Slurm's form; empty for none."""
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

    The result has the hosts that the user excludes, the hosts that the trial avoids, and ``more``.
    """
    own = excluded_by_user(run, number, group)
    avoided = [one.host for one in hosts.avoided(run)]
    return ",".join(sorted({one for one in (own, *avoided, *more) if one}))


def exclude_option(run: RunPaths, number: int, group: str) -> tuple[str, ...]:
    """Return the option of sbatch that excludes `excluded_hosts`; empty without such hosts."""
    return (f"--exclude={text}",) if (text := excluded_hosts(run, number, group)) else ()


def avoid_host(
    client: SlurmClient, run: RunPaths, number: int, group: str, host: str, why: str
) -> bool:
    """Avoid a host from now on; return False if every job of the group needs the host."""
    wanted = excluded_hosts(run, number, group, host)
    try:
        client.try_out(run.submission_script(number, group), f"--exclude={wanted}")
    except SchedulerError as error:
        logger.warning("host %s stays, because no job could start without it: %s", host, error)
        return False
    logger.warning("jobs of this trial exclude host %s from now on: %s", host, why)
    hosts.avoid(run, host, why)
    return True


def element_ranges(tasks: Iterable[TaskState]) -> list[str]:
    """Return elements as ranges of each array (``41_[2-7]``), for Slurm's commands.

    A bare job id could mean the whole array or its last element.
    """
    found: dict[str, list[int]] = {}
    for task in tasks:
        found.setdefault(task.job_id.partition("_")[0], []).append(task.element)
    return [f"{job}_[{element_list(elements)}]" for job, elements in found.items()]


def queued_elements(tasks: list[TaskState], group: str) -> list[str]:
    """Return the pending elements of a group as `element_ranges`."""
    return element_ranges(
        task for task in tasks if task.group == group and task.state is JobState.PENDING
    )


def exclude_from_queued(
    client: SlurmClient, run: RunPaths, number: int, group: str, tasks: list[TaskState]
) -> bool:
    """Exclude `excluded_hosts` for all queued elements of a group.

    Return False if Slurm rejects the change. Raises SchedulerError if Slurm does not answer.
    """
    # `slurmrl status` imports this module and needs no subprocesses.
    from slurmrl.scheduler.client import may_have_worked

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
    """Return the newest submission that has a request; None without any."""
    for number in sorted(submission_numbers(paths), reverse=True):
        path = paths.submission_request(number)
        try:
            request = documents.read(path, REQUEST, REQUIRED)
        except FileNotFoundError:
            continue  # The submitting process has ended, or has not written the request yet.
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
    """Return the name of a submission's scheduler. Raises FileNotFoundError, CorruptFileError."""
    found: str = documents.read(paths.submission_request(number), REQUEST, REQUIRED)["scheduler"]
    return found


def submission_numbers(paths: RunPaths) -> list[int]:
    """Return the numbers of the trial's submissions, in no order."""
    try:
        names = atomic.list_names(paths.submissions)
    except FileNotFoundError:
        return []
    return [int(name) for name in names if DIGITS.fullmatch(name)]


_FIELDS: Fields = {"tasks": COUNT, "planned": COUNT}


def wanted_tasks(run: RunPaths, group: str, planned: int) -> int:
    """Return the number of tasks that a user has set for a group, else ``planned``.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        found = documents.read(run.scale(group), _FIELDS, _FIELDS)
    except FileNotFoundError:
        return planned
    tasks: int = found["tasks"]
    return tasks if found["planned"] == planned else planned


def set_wanted_tasks(run: RunPaths, group: str, tasks: int, planned: int) -> None:
    """Record a user's number of tasks for a group; 0 pauses the group."""
    data = {"tasks": tasks, "planned": planned}
    atomic.replace(run.scale(group), json.dumps(data).encode())


@dataclass(frozen=True, kw_only=True)
class Orphaned:
    """The record of missing trainers: their newest incarnation and its first agent's lease."""

    incarnation: Annotated[int, COUNT]
    attempt: Annotated[int, COUNT]
    counter: Annotated[int, SIZE] | None = None
    """Counter in the last heartbeat; None if the agent sent none."""


def read_orphaned(run: RunPaths, group: str) -> Orphaned | None:
    """Return the record of missing trainers; None if there is none.

    Raises CorruptFileError, EnvironmentFailure.
    """
    path = run.orphaned(group)
    try:
        return documents.from_json(Orphaned, documents.read(path), path)
    except FileNotFoundError:
        return None


def write_orphaned(run: RunPaths, group: str, seen: Orphaned) -> None:
    atomic.replace(run.orphaned(group), json.dumps(documents.to_json(seen)).encode())


def remove_orphaned(run: RunPaths, group: str) -> None:
    """Remove the record of missing trainers, because the trainers are back."""
    atomic.remove(run.orphaned(group))


def is_orphaned(run: RunPaths, group: str) -> bool:
    """Return whether the trainers of a group's tasks are missing, according to the record.

    Raises CorruptFileError, EnvironmentFailure.
    """
    seen = read_orphaned(run, group)
    return seen is not None and seen.incarnation == fold(History(run.history).read()).incarnation


def request_stop(run: RunPaths, number: int, by: str) -> None:
    """Record that the user ``by`` wants the submission to stop. Raises EnvironmentFailure."""
    atomic.replace(run.submission_stop(number), by.encode())


def withdraw_stop(run: RunPaths, number: int) -> None:
    """Remove the request to stop a submission. Raises EnvironmentFailure."""
    atomic.remove(run.submission_stop(number))


def stop_requested_by(run: RunPaths, number: int) -> str:
    """Return the user who requested that a submission stops; empty without a request.

    Raises CorruptFileError, EnvironmentFailure.
    """
    try:
        return atomic.read(run.submission_stop(number)).decode(errors="replace") or "a user"
    except FileNotFoundError:
        return ""
