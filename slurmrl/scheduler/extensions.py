"""Arrays that extend a submission, as files beside its job ids.

The *claim* ``GROUP.more.K.json`` is created exclusively before sbatch is called, the *note*
``GROUP.more.K.job.json`` after it. Whoever is killed between the two leaves a job that is found by
its name, which holds K, or a claim without a job, which is void and whose numbers stay unused. Of a
claim that sbatch refused the note says so; of a void one whoever extends the group next.
"""

from __future__ import annotations

import json
import os
import re
import socket
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.failures import corrupt
from slurmrl.fsio.shapes import COUNT, SIZE, TEXT, Fields
from slurmrl.paths import RunPaths
from slurmrl.scheduler import parse, submission
from slurmrl.scheduler.processes import ProcessId, boot_id

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
    """Who made it: the element that runs (``41_6``), or a person's command."""
    records: int
    """How long the history was."""
    host: str
    boot: str
    pid: int
    start_ticks: int
    nonce: str

    @staticmethod
    def of_this_process(*, index: int, first: int, count: int, by: str, records: int) -> Claim:
        me = ProcessId.of(os.getpid())
        assert me is not None, "this process runs"
        here, nonce = socket.gethostname(), uuid.uuid4().hex
        return Claim(
            index, first, count, by, records, here, boot_id(), me.pid, me.start_ticks, nonce
        )

    @property
    def claimant_is_gone(self) -> bool:
        """It can be seen from here that nobody will submit this extension any more."""
        if self.boot == boot_id():
            return not ProcessId(self.pid, self.start_ticks).alive()
        return self.host == socket.gethostname()  # the machine was started again since


@dataclass(frozen=True)
class Extension:
    claim: Claim
    name: str
    """Name of its job."""
    job: str | None
    """Its job id; None if nobody has noted it, or there is none."""
    refused: bool = False
    """There is none for certain."""

    @property
    def open(self) -> bool:
        """Its job, if there is one, can be found by its name only."""
        return self.job is None and not self.refused


def read(run: RunPaths, number: int, group: str) -> list[Extension]:
    """The extensions of a group of a submission, in their order. Raises CorruptFileError."""
    found = []
    for file in _names(run, number):
        match = _CLAIM.fullmatch(file)
        if match and match["group"] == group:
            found.append(_read(run, number, group, int(match["index"])))
    return sorted(found, key=lambda extension: extension.claim.index)


def take(run: RunPaths, number: int, group: str, claim: Claim) -> bool:
    """Claim an extension; False if somebody else has."""
    path = run.extension_claim(number, group, claim.index)
    return atomic.exclusive_create(path, json.dumps(asdict(claim)).encode())


def note(run: RunPaths, number: int, group: str, index: int, job: str | None) -> None:
    """Its job id; None: sbatch refused it."""
    path = run.extension_job(number, group, index)
    atomic.replace(path, json.dumps({"job": job}).encode())


def close(run: RunPaths, number: int, group: str, index: int) -> None:
    """Note that a claim has no job, unless there is a note. A claimant that submits all the same
    replaces it."""
    path = run.extension_job(number, group, index)
    atomic.exclusive_create(path, json.dumps({"job": None}).encode())


def name(run: RunPaths, number: int, group: str, index: int) -> str:
    """The job name of an extension: that of the first array, and its index."""
    return f"{submission.directive(run, number, group, 'job-name')}.{index}"


def length(run: RunPaths, number: int, group: str) -> tuple[int, int]:
    """Elements of the group's first array, and how many of them run at once."""
    array = submission.directive(run, number, group, "array")
    throttle = array.partition("%")[2]
    with documents.expecting(run.submission_script(number, group)):
        return len(parse.elements(array)), int(throttle) if throttle.isdecimal() else 1


def _read(run: RunPaths, number: int, group: str, index: int) -> Extension:
    path = run.extension_claim(number, group, index)
    values = documents.read(path, _FIELDS, _FIELDS)
    claim = Claim(**{name: values[name] for name in _FIELDS})
    if claim.index != index:
        raise corrupt(path, f"holds the claim of extension {claim.index}")
    found, job = _job(run.extension_job(number, group, index))
    return Extension(claim, name(run, number, group, index), job, refused=found and job is None)


def _job(path: Path) -> tuple[bool, str | None]:
    """Whether there is a note, and the job id in it."""
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
