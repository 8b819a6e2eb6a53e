"""The files that every scheduler keeps in ``submissions/<n>/``, and the hosts that jobs exclude."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

from slurmrl import log
from slurmrl.errors import SchedulerError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import FILE_NAME, TEXT, FieldType, shown
from slurmrl.fsio.failures import corrupt
from slurmrl.run import hosts
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, TaskState
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.parse import element_list

logger = log.get(__name__)

NO_LONGER_PENDING = "no longer pending"
"""scontrol's message for elements that have just started; it changes the others."""
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
    """The job ids by group; None if the submission did not get as far as writing them.

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
    """Read job name -> group from the written scripts."""
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
    """Return the same as an option of sbatch."""
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
    """Apply the present exclusion to all queued elements of a group.

    Return False where Slurm refuses to change them. Raises SchedulerError where it does not answer.
    """
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
