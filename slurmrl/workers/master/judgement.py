"""The decision whether to begin another incarnation, from how the previous ones ended.

Pure functions, apart from reading failures from the name store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from slurmrl.display.words import first_line
from slurmrl.name_resolve.base import NameStore
from slurmrl.run.history.record import Kind, Record
from slurmrl.run.history.state import fold
from slurmrl.run.reports import Cause, Failure
from slurmrl.watch import published
from slurmrl.workers.evidence import is_hang
from slurmrl.workers.failure import HOST_LOSSES
from slurmrl.workers.turns import put_back

RAISED = (Cause.EXCEPTION, Cause.MASTER)
"""Causes of failures that code of a worker or the master raised, and would raise again."""
TIME_LIMIT = "time_limit"
UNFAULTED = ("preemption", "interrupt")
"""Causes that end a job through no fault of the run: such starts do not count against it."""
LOSSES = 10
"""This many times ``max_restarts_without_commit`` starts may be lost with their hosts."""


@dataclass(frozen=True)
class Ending:
    """How an incarnation ended, as far as it was reported."""

    incarnation: int
    start: str = ""
    """The start of its job, ``JOBID.RESTARTCOUNT``."""
    reason: str = ""
    """Reason of its first failure, with the rank; empty if nothing failed."""
    what: str = ""
    """The reason without the rank, since it is random which of several ranks fails first."""
    cause: str = ""
    step: int | None = None
    traceback: str = ""
    final: bool = False
    """A user error, which another start would meet again."""
    damaged: bool = False
    """It could not read the checkpoint that it resumed from."""
    absent: str = ""
    """Path of an input that did not exist, although its directory could be read."""
    warned: str = ""
    """Cause of the warning that its job would end, if there was one."""
    requeued: bool = False
    """Slurm has requeued its job since, or ended it together with its host."""
    echo: bool = False
    """Its failure looks like a consequence of another rank's end, with nothing else known."""
    hang: str = ""
    """Who waited for whom, where it was ended for silence or a deadline. For people only: its times
    differ from one incarnation to the next."""
    host: str = ""
    certain: bool = False
    """The hardware of the host failed, whatever the code did."""
    repeated: bool = False
    """A GPU fault that a change of hosts did not remedy."""
    shared_loss: bool = False
    """The next incarnation of the same start of the job was lost with its host: so was this one."""

    @property
    def lost(self) -> bool:
        """Whether it was lost together with a host."""
        taken = self.requeued and (not self.reason or self.echo)
        remedied = self.cause in HOST_LOSSES and not self.repeated
        return taken or self.shared_loss or remedied

    @property
    def counts(self) -> bool:
        """Whether it counts against another start: not if its job was taken away."""
        return not (self.lost or self.warned in UNFAULTED or self.damaged)


@dataclass(frozen=True)
class Verdict:
    """Why no further start is made."""

    reason: str
    traceback: str

    @property
    def data(self) -> dict[str, Any]:
        """Data of the FAILED record."""
        return {"reason": self.reason, "traceback": self.traceback}


def judge(
    records: list[Record],
    names: NameStore,
    job: str,
    max_begins: int,
    explain_limit: Callable[[Ending], str] = lambda ending: "",
) -> Verdict | None:
    """Return why another incarnation, in ``job``, would be futile; None if it would not.

    It is futile if the last one met a user error (a UsageError), if user code failed with the same
    exception at the same step twice, if the same input was absent twice in a row, if two jobs in a
    row reached their time limit before a commit (``explain_limit`` adds figures), or if
    ``max_begins`` incarnations in a row made no commit.
    Incarnations whose job was taken away do not count, unless very many were lost without warning.
    """
    in_vain = fold(records).begins_without_commit
    begun = _since_resume(records)[-(in_vain + 1) :]  # with the one that made the last commit
    if not begun:
        return None
    jobs_after = [*(record.data.get("job", "") for record in begun[1:]), job]
    taken = put_back(names)
    endings = [
        read_ending(names, record, after, taken)
        for record, after in zip(begun, jobs_after, strict=True)
    ]
    endings = _with_repeated_faults(_with_shared_losses(endings))
    if endings[-1].final:
        return Verdict(endings[-1].reason, "")
    if in_vain == 0:
        return None
    against = [ending for ending in endings if ending.counts]
    vain = [ending for ending in against if ending in endings[-in_vain:]]
    lost = _lost(endings[-in_vain:], LOSSES * max_begins)
    if not vain:
        return lost
    return (
        _same_exception(against[-2:])
        or _absent(endings[-2:])
        or _time_limit(vain[-2:], explain_limit)
        or _too_many(vain, max_begins)
        or lost
    )


def _with_shared_losses(endings: list[Ending]) -> list[Ending]:
    """Mark incarnations that ended with a broken connection because a host had died: only the next
    incarnation of the same job finds the host missing."""
    marked: list[Ending] = []
    for ending in reversed(endings):
        follower = marked[-1] if marked else None
        lost = follower is not None and follower.lost and follower.start == ending.start
        marked.append(replace(ending, shared_loss=ending.echo and lost))
    return marked[::-1]


def _with_repeated_faults(endings: list[Ending]) -> list[Ending]:
    """Mark GPU faults of a host that failed before, since nothing replaces it, and those that the
    same call met at the same step on another host, since the code may cause them."""
    marked: list[Ending] = []
    for ending in endings:
        before = [fault for fault in marked if ending.cause == fault.cause == Cause.GPU_FAULT]
        repeated = any(
            fault.host == ending.host
            or (not ending.certain and (fault.what, fault.step) == (ending.what, ending.step))
            for fault in before
        )
        marked.append(replace(ending, repeated=repeated))
    return marked


def read_ending(
    names: NameStore, begin: Record, next_job: str, taken: Collection[str] = ()
) -> Ending:
    """Return how the incarnation of a BEGIN record ended. ``next_job`` is the job of the next
    incarnation; ``taken`` are the starts of jobs that Slurm has taken away."""
    number = begin.incarnation
    warned = published.warned(names, number)
    job = str(begin.data.get("job", ""))
    ending = Ending(
        number,
        start=_start(job),
        warned=warned.cause if warned is not None else "",
        requeued=_requeued(job, next_job) or _start(job) in taken,
    )
    failure = published.failure(names, number)
    return ending if failure is None else _with_failure(ending, failure, names)


def _with_failure(ending: Ending, failure: Failure, names: NameStore) -> Ending:
    what = failure.exception or failure.reason or failure.damage or "unknown"
    rank = ""
    if failure.rank is not None and failure.call:
        rank, what = f"rank {failure.rank}, ", f"{failure.call}: {what}"
    hang = published.hang(names, ending.incarnation) if is_hang(failure) else None
    return replace(
        ending,
        reason=f"{rank}{what}",
        what=what,
        cause=failure.cause or (Cause.EXCEPTION if failure.traceback else ""),
        step=failure.step,
        traceback=failure.traceback,
        final=failure.final,
        damaged=bool(failure.damaged),
        absent=failure.absent,
        echo=failure.echo,
        hang=first_line(hang.text) if hang is not None else "",
        host=failure.host or "",
        certain=failure.certain,
    )


def _start(job: str) -> str:
    """Return ``JOBID.RESTARTCOUNT`` of a tag that also has the round."""
    return ".".join(job.split(".")[:2])


def _requeued(job: str, after: str) -> bool:
    """Whether ``after`` is a later start of the same job: tags are id, restart and round."""
    id_before, _, starts_before = job.partition(".")
    id_after, _, starts_after = after.partition(".")
    return id_before == id_after and starts_before.split(".")[0] != starts_after.split(".")[0]


def _since_resume(records: list[Record]) -> list[Record]:
    """Return the BEGIN records after the last RESUME: the user may have fixed the problem."""
    begun: list[Record] = []
    for record in records:
        if record.kind is Kind.RESUME:
            begun.clear()
        elif record.kind is Kind.BEGIN:
            begun.append(record)
    return begun


def _same_exception(last_two: list[Ending]) -> Verdict | None:
    last = last_two[-1]
    if len(last_two) < 2 or last.cause not in RAISED or not last.traceback:
        return None
    if (last_two[0].what, last_two[0].step) != (last.what, last.step):
        return None
    return Verdict(f"failed twice in the same way: {last.reason}", last.traceback)


def _absent(last_two: list[Ending]) -> Verdict | None:
    """A file that is missing from a directory that can be read was deleted."""
    last = last_two[-1]
    if len(last_two) < 2 or not last.absent or last_two[0].absent != last.absent:
        return None
    why = "two starts in a row did not find it, although its directory could be read"
    return Verdict(f"{last.reason}; {why}", "")


def _time_limit(last_two: list[Ending], explain: Callable[[Ending], str]) -> Verdict | None:
    if len(last_two) < 2 or any(ending.warned != TIME_LIMIT for ending in last_two):
        return None
    why = explain(last_two[-1])
    text = "the time limit is too short: two jobs in a row reached it before their first commit"
    return Verdict(f"{text}{'; ' if why else ''}{why}", "")


def _lost(endings: list[Ending], most: int) -> Verdict | None:
    """A trial that loses host after host may itself be the reason."""
    lost = [ending for ending in endings if ending.lost and not ending.warned]
    if len(lost) < most:
        return None
    text = f"{len(lost)} starts in a row were lost with a host before a commit"
    return Verdict(f"{text}: do their hosts fail because of this trial?", "")


def _too_many(vain: list[Ending], max_begins: int) -> Verdict | None:
    if len(vain) < max_begins:
        return None
    last = vain[-1]
    traceback = next((ending.traceback for ending in reversed(vain) if ending.traceback), "")
    why = last.reason or "its processes ended without reporting a reason"
    hang = f"; {last.hang}" if last.hang else ""
    starts = "1 start" if len(vain) == 1 else f"{len(vain)} starts in a row"
    text = f"{starts} without a new commit; the last one: {why}{hang}"
    return Verdict(text, traceback)
