"""The files that record the arrays extending a submission.

The *claim* ``GROUP.more.K.json`` is created exclusively before sbatch is called, the *note*
``GROUP.more.K.job.json`` after it. Whoever is killed between the two leaves a job that is found by
its name, which holds K, or a claim without a job. Such a claim is void and its indices stay unused.
The note of a refused claim holds no job; the next extension writes the same for a void one.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import COUNT, SIZE, TEXT, Fields
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import parse, submission
from slurmrl.scheduler.processes import Claimant

_CLAIM = re.compile(r"(?P<group>.+)\.more\.(?P<index>[0-9]{1,9})\.json")
_FIELDS: Fields = {
    "index": COUNT,
    "first": COUNT,
    "count": COUNT,
    "by": TEXT,
    "records": COUNT,
    "host": TEXT,
    "boot": TEXT,
    "pid": COUNT,
    "start_ticks": SIZE,
    "nonce": TEXT,
}


@dataclass(frozen=True)
class Claim:
    """One extension: elements ``first`` to ``first + count - 1`` of a group."""

    index: int
    """1 for the first extension of the group."""
    first: int
    count: int
    by: str
    """The claimant: the running element (``41_6``), or a user's command."""
    records: int
    """Length of the history at that time."""
    claimant: Claimant = field(default_factory=Claimant.of_this_process)


@dataclass(frozen=True)
class Extension:
    claim: Claim
    name: str
    """Name of its job."""
    job: str | None
    """Its job id; None if there is no note, or no job."""
    refused: bool = False
    """There is certainly no job."""

    @property
    def open(self) -> bool:
        """Whether its job, if any, can only be found by name."""
        return self.job is None and not self.refused


def read(run: RunPaths, number: int, group: str) -> list[Extension]:
    """Return the extensions of a group of a submission, in order. Raises CorruptFileError."""
    found = []
    for file in _names(run, number):
        match = _CLAIM.fullmatch(file)
        if match and match["group"] == group:
            found.append(_read(run, number, group, int(match["index"])))
    return sorted(found, key=lambda extension: extension.claim.index)


def take(run: RunPaths, number: int, group: str, claim: Claim) -> bool:
    """Claim an extension; return False if another process has claimed it."""
    path = run.extension_claim(number, group, claim.index)
    values = asdict(claim)
    values |= values.pop("claimant")
    return atomic.exclusive_create(path, json.dumps(values).encode())


def note(run: RunPaths, number: int, group: str, index: int, job: str | None) -> None:
    """Write the job id of an extension; None: sbatch refused it."""
    path = run.extension_job(number, group, index)
    atomic.replace(path, json.dumps({"job": job}).encode())


def close(run: RunPaths, number: int, group: str, index: int) -> None:
    """Note that a claim has no job, unless there is a note. A claimant that submits nevertheless
    replaces the note."""
    path = run.extension_job(number, group, index)
    atomic.exclusive_create(path, json.dumps({"job": None}).encode())


def name(run: RunPaths, number: int, group: str, index: int) -> str:
    """Return the job name of an extension: that of the first array, and its index."""
    return f"{submission.directive(run, number, group, 'job-name')}.{index}"


def length(run: RunPaths, number: int, group: str) -> tuple[int, int]:
    """Return the length of the group's first array and its throttle."""
    array = submission.directive(run, number, group, "array")
    throttle = array.partition("%")[2]
    with documents.expecting(run.submission_script(number, group)):
        return len(parse.elements(array)), int(throttle) if throttle.isdecimal() else 1


def _read(run: RunPaths, number: int, group: str, index: int) -> Extension:
    path = run.extension_claim(number, group, index)
    values = documents.read(path, _FIELDS, _FIELDS)
    claimant = Claimant(**{one.name: values.pop(one.name) for one in fields(Claimant)})
    claim = Claim(**{name: values[name] for name in _FIELDS if name in values}, claimant=claimant)
    if claim.index != index:
        raise corrupt(path, f"holds the claim of extension {claim.index}")
    found, job = _job(run.extension_job(number, group, index))
    return Extension(claim, name(run, number, group, index), job, refused=found and job is None)


def _job(path: Path) -> tuple[bool, str | None]:
    """Return whether there is a note, and its job id."""
    try:
        values = documents.read(path, {"job": submission.JOB})
    except FileNotFoundError:
        return False, None
    if "job" not in values:
        raise corrupt(path, "has no 'job'")
    return True, values["job"]


def _names(run: RunPaths, number: int) -> list[str]:
    try:
        return atomic.list_names(run.submission(number))
    except FileNotFoundError:
        return []
