"""The scripts and job ids that every scheduler keeps in ``submissions/<n>/``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import FILE_NAME, TEXT, FieldType, shown
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds

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
    """Return the variables that the jobs of a submission inherit; None without a record. Raises
    CorruptFileError."""
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


def excluded(run: RunPaths, number: int, group: str) -> str:
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
