"""Extension of a group by additional arrays. Each array starts after the earlier arrays.

A process exclusively creates the *claim* ``GROUP.more.K.json`` before it calls sbatch, and writes
the *note* ``GROUP.more.K.job.json`` afterwards. The note has the job id, or no id if sbatch
rejected the request. If the process is killed between claim and note, other processes find its job
by the K in the job's name.

A claim without a job is *void* once its claimant has ended. Void claims leave their array indices
unused. The next extension writes their notes, without a job id. A claim yields at most one array.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from slurmrl import log
from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import COUNT, SIZE, TEXT, Fields
from slurmrl.run.history.slots import History
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import parse, submission
from slurmrl.scheduler.base import TaskState
from slurmrl.scheduler.client import TIMEOUT_S, SlurmClient, may_have_worked
from slurmrl.scheduler.submission import Claimant, is_gone

logger = log.get(__name__)

SETTLE_S = TIMEOUT_S + 30.0
"""Seconds after which a claim without a job is void. The claimant's sbatch has then timed out."""
LOOK_S = 5.0
"""Seconds between two queries for the job of a claim."""
TOO_MANY = re.compile(
    r"submit ?jobs?(per\w+)?limit|job submit limit|invalid job array|job array index|MaxArraySize"
    r"|too many (jobs|tasks)|job count limit|MaxJobCount",
    re.IGNORECASE,
)
"""sbatch's messages about an array that is too long."""
_RECORD = re.compile(r"ClusterName=\S+ Account=(\S*) UserName=([^\s(]*)")
_SUBMIT = re.compile(r"\b(?:Max|Grp)SubmitJobs=(\d+)\((\d+)\)")
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
    """The claim of one extension: elements ``first`` to ``first + count - 1`` of a group."""

    index: int
    """Number of the extension, from 1."""
    first: int
    count: int
    by: str
    """Name of the claimant: the running element (``41_6``) or a user's command."""
    records: int
    """Number of records in the history at the time of the claim."""
    claimant: Claimant = field(default_factory=Claimant.of_this_process)


@dataclass(frozen=True)
class Extension:
    """One extension of a group: its claim, and its note if there is one."""

    claim: Claim
    name: str
    """Name of the array's job."""
    job: str | None
    """Id of the array's job; None if there is no note or no job."""
    refused: bool = False
    """Whether the note states that there is no job."""

    @property
    def open(self) -> bool:
        """Whether there is no note, so that only the job's name can show whether there is a job."""
        return self.job is None and not self.refused


def read(run: RunPaths, number: int, group: str) -> list[Extension]:
    """Return the extensions of a submission's group, in order. Raises CorruptFileError."""
    found = []
    for file in _names(run, number):
        if (match := _CLAIM.fullmatch(file)) and match["group"] == group:
            found.append(_read(run, number, group, int(match["index"])))
    return sorted(found, key=lambda extension: extension.claim.index)


def take(run: RunPaths, number: int, group: str, claim: Claim) -> bool:
    """Claim an extension. Return False if another process has claimed this extension."""
    path = run.extension_claim(number, group, claim.index)
    values = asdict(claim)
    values |= values.pop("claimant")
    return atomic.exclusive_create(path, json.dumps(values).encode())


def note(run: RunPaths, number: int, group: str, index: int, job: str | None) -> None:
    """Write the note of an extension with its job id, or with None if sbatch rejected it."""
    path = run.extension_job(number, group, index)
    atomic.replace(path, json.dumps({"job": job}).encode())


def close(run: RunPaths, number: int, group: str, index: int) -> None:
    """Write the note that a claim has no job, unless the claim has a note.

    If the claimant submits a job after all, its note replaces this note.
    """
    path = run.extension_job(number, group, index)
    atomic.exclusive_create(path, json.dumps({"job": None}).encode())


def name(run: RunPaths, number: int, group: str, index: int) -> str:
    """Return the job name of an extension: the first array's name, a dot and the index."""
    return f"{submission.directive(run, number, group, 'job-name')}.{index}"


def length(run: RunPaths, number: int, group: str) -> tuple[int, int]:
    """Return length and throttle of the group's first array."""
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
    """Return whether the note exists, and the job id in it."""
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


class Extender:
    """Submits additional arrays of one group of one submission."""

    def __init__(
        self,
        client: SlurmClient,
        run: RunPaths,
        number: int,
        group: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run, self._number, self._group = client, run, number, group
        self._sleep, self._clock = sleep, clock

    def extend(
        self,
        tasks: Sequence[TaskState],
        *,
        known: Sequence[str],
        by: str,
        count: int | None = None,
    ) -> str:
        """Submit another array; return its job id.

        ``tasks`` are all elements, queried when the group had the arrays ``known``. ``by`` is the
        caller's unique name. ``count`` new elements may all run at once; None repeats length and
        throttle of the first array.

        Raises UsageError if another process has extended the group since the query or is extending
        it, or if array indices run out. Raises SchedulerError if sbatch rejects the request.
        """
        before = read(self._run, self._number, self._group)
        if {one.job for one in before} - {None, *known}:
            raise UsageError(f"another process has just extended group {self._group}: try again")
        if before and before[-1].open:
            found = self._settle(before[-1], tasks, by)
            if found is not None:
                return found
        claim = self._claim(before, by, count)
        if not take(self._run, self._number, self._group, claim):
            raise UsageError(f"another process is extending group {self._group}: try again later")
        active = {
            task.job_id.partition("_")[0]
            for task in tasks
            if task.group == self._group and task.state.active
        }
        after = () if count else sorted(active, key=int)
        try:
            job = self._submit(claim, after, all_at_once=count is not None)
        except SchedulerError as error:
            if not may_have_worked(error):
                note(self._run, self._number, self._group, claim.index, None)
            raise
        note(self._run, self._number, self._group, claim.index, job)
        self._close([one for one in before if one.open])
        return job

    def _claim(self, before: Sequence[Extension], by: str, count: int | None) -> Claim:
        at_first, _ = length(self._run, self._number, self._group)
        used = [one.claim for one in before if not one.refused]
        first = used[-1].first + used[-1].count if used else at_first
        most = array_limit(self._client.settings())
        room = at_first if most is None else most - first
        wanted = count or at_first
        if room <= 0:
            raise UsageError(
                f"group {self._group} has used all {most} array indices of this cluster: resume "
                "the trial when its last link has ended"
            )
        return Claim(
            index=before[-1].claim.index + 1 if before else 1,
            first=first,
            count=min(wanted, room) if most is not None else wanted,
            by=by,
            records=History(self._run.history).count(),
        )

    def _submit(self, claim: Claim, after: Sequence[str], *, all_at_once: bool) -> str:
        """Call sbatch; halve the number of elements after each rejection by a limit.

        The remaining array indices stay unused.
        """
        _, at_once = length(self._run, self._number, self._group)
        options = [f"--job-name={name(self._run, self._number, self._group, claim.index)}"]
        if after:
            options.append(f"--dependency=afterany:{':'.join(after)}")
        options += submission.exclude_option(self._run, self._number, self._group)
        script = self._run.submission_script(self._number, self._group)
        inherited = submission.read_environment(self._run, self._number)
        count = claim.count
        while True:
            throttle = count if all_at_once else at_once
            array = f"--array={claim.first}-{claim.first + count - 1}%{throttle}"
            try:
                return self._client.submit(script, array, *options, inherited=inherited)
            except SchedulerError as error:
                if count == 1 or not TOO_MANY.search(str(error)):
                    raise
                logger.info("sbatch rejected %d more elements: %s", count, error)
                count //= 2

    def _settle(self, last: Extension, tasks: Sequence[TaskState], by: str) -> str | None:
        """Return the job of a claim without a note; None once the claim is void."""
        deadline = self._clock() + SETTLE_S
        while True:
            note_path = self._run.extension_job(self._number, self._group, last.claim.index)
            job = _job(note_path)[1] or self._by_name(last)
            if job is not None:
                note(self._run, self._number, self._group, last.claim.index, job)
                return job
            if _is_void(last.claim, tasks, by) or self._clock() >= deadline:
                return None
            self._sleep(LOOK_S)

    def _close(self, void: Sequence[Extension]) -> None:
        """Query the jobs of void claims for the last time, and write their notes.

        Slurm has accepted a later array, so its answer shows all earlier arrays. Without the notes,
        each later call would query these jobs again.
        """
        if not void:
            return
        try:
            found = {row.name: row.job for row in self._client.queue_by_name(o.name for o in void)}
            for one in void:
                index, job = one.claim.index, found.get(one.name)
                if job is None:
                    close(self._run, self._number, self._group, index)
                else:
                    note(self._run, self._number, self._group, index, job)
        except EnvironmentFailure as error:
            logger.info(
                "cannot record failed extensions, and the next extension tries again: %s", error
            )

    def _by_name(self, last: Extension) -> str | None:
        return next((row.job for row in self._client.queue_by_name([last.name])), None)


def _is_void(claim: Claim, tasks: Sequence[TaskState], by: str) -> bool:
    """Return whether the claimant can no longer submit a job.

    True for an earlier start of the element ``by``, an ended element and an ended process.
    """
    element = next((task for task in tasks if task.job_id == claim.by), None)
    ended = element is not None and not element.state.active
    return claim.by == by or ended or bool(is_gone(asdict(claim.claimant)))


def array_limit(settings: Mapping[str, str]) -> int | None:
    """Return the maximum length of an array from ``scontrol show config``; None if unknown.

    Raises EnvironmentFailure if the cluster disables job arrays.
    """
    text = settings.get("MaxArraySize", "")
    if not text.isdigit():
        return None
    if int(text) == 0:
        raise EnvironmentFailure(
            "job arrays are disabled on this cluster (MaxArraySize=0), and a chain of links is an "
            "array: ask the administrators to enable them"
        )
    return int(text)


def submit_room(text: str, user: str, account: str | None) -> int | None:
    """Return the number of additional jobs that a user may submit; None without a limit.

    ``text`` is the output of ``scontrol show assoc_mgr``. Records of the account itself limit all
    of its users together, and also apply.
    """
    records = [
        (found[1], found[2], part)
        for part in re.split(r"^(?=ClusterName=)", text, flags=re.MULTILINE)
        if (found := _RECORD.match(part))
    ]
    own = [name for name, owner, part in records if owner == user and "DefAssoc=No" not in part]
    wanted = account or (own[0] if own else None)
    room = [
        int(limit) - int(used)
        for name, owner, part in records
        if owner in (user, "") and name == wanted
        for limit, used in _SUBMIT.findall(part)
    ]
    return max(min(room), 0) if room else None
