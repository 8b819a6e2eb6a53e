"""The decision whether to begin another incarnation, from the ends of earlier incarnations.

All functions are pure, except that they read failures from the name store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from slurmrl.name_resolve.store import NameStore
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import fold
from slurmrl.run.reports import HANGS, RAISED, Cause, Ending, Failure, JobTag
from slurmrl.watch import published
from slurmrl.workers.link import starts_put_back

TIME_LIMIT = "time_limit"
LOSSES = 10
"""Factor by which the limit ``max_restarts_without_commit`` is higher for starts that lost a host.
"""


def futile_start(
    records: list[Record],
    names: NameStore,
    job: str,
    max_begins: int,
    explain_limit: Callable[[Ending], str] = lambda ending: "",
) -> dict[str, Any] | None:
    """Return the data of a FAILED record if another incarnation would also fail, else None.

    The data has a reason and a traceback. Another incarnation in ``job`` would also fail if:

    - the last incarnation ended with a user error (a UsageError)
    - user code failed with the same exception at the same step twice
    - the same input was absent twice in a row
    - two jobs in a row reached their time limit before a commit (``explain_limit`` adds figures)
    - ``max_begins`` incarnations in a row made no commit; if Slurm requeued or ended the job of an
      incarnation, this incarnation does not count
    - ``LOSSES * max_begins`` of these incarnations lost a host without a warning
    """
    in_vain = fold(records).begins_without_commit
    # One more: include the incarnation that made the last commit.
    begun = _since_resume(records)[-(in_vain + 1) :]
    if not begun:
        return None
    jobs_after = [*(JobTag.of(record.data) for record in begun[1:]), JobTag(job)]
    taken = starts_put_back(names)
    endings = [
        read_ending(names, record, after, taken)
        for record, after in zip(begun, jobs_after, strict=True)
    ]
    endings = _with_repeated_faults(_with_shared_losses(endings))
    if endings[-1].failure.final:
        return _futile(endings[-1].reason)
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


def _futile(reason: str, traceback: str = "") -> dict[str, Any]:
    return {"reason": reason, "traceback": traceback}


def _with_shared_losses(endings: list[Ending]) -> list[Ending]:
    """Mark incarnations that ended with a broken connection because a host was lost.

    Only the next incarnation of the same job records the loss.
    """
    marked: list[Ending] = []
    for ending in reversed(endings):
        follower = marked[-1] if marked else None
        lost = follower is not None and follower.lost and follower.job.start == ending.job.start
        marked.append(replace(ending, shared_loss=ending.failure.echo and lost))
    return marked[::-1]


def _with_repeated_faults(endings: list[Ending]) -> list[Ending]:
    """Mark GPU faults that are likely to happen again.

    - faults on a host that failed before and that no other host replaces
    - faults that also occurred on another host in the same call and step, because the code may
      cause them
    """
    marked: list[Ending] = []
    for ending in endings:
        before = [fault for fault in marked if ending.cause == fault.cause == Cause.GPU_FAULT]
        repeated = any(
            fault.failure.host == ending.failure.host
            or (not ending.failure.certain and _same_place(fault, ending))
            for fault in before
        )
        marked.append(replace(ending, repeated=repeated))
    return marked


def read_ending(
    names: NameStore, begin: Record, next_job: JobTag, taken: Collection[str] = ()
) -> Ending:
    """Return the end of the incarnation that a BEGIN record began.

    ``next_job`` is the job of the next incarnation. ``taken`` has the starts of jobs that Slurm
    requeued, or ended with their host.
    """
    number, job = begin.incarnation, JobTag.of(begin.data)
    failure = published.failure(names, number) or Failure()
    return Ending(
        number,
        job=job,
        failure=failure,
        warned=published.warned(names, number),
        hang=published.hang(names, number) if failure.cause in HANGS else None,
        requeued=job.is_requeued_as(next_job) or job.start in taken,
    )


def _since_resume(records: list[Record]) -> list[Record]:
    """Return the BEGIN records after the last RESUME. The user may have fixed earlier problems."""
    begun: list[Record] = []
    for record in records:
        if record.kind is Kind.RESUME:
            begun.clear()
        elif record.kind is Kind.BEGIN:
            begun.append(record)
    return begun


def _same_exception(last_two: list[Ending]) -> dict[str, Any] | None:
    last = last_two[-1]
    if len(last_two) < 2 or last.cause not in RAISED or not last.failure.traceback:
        return None
    if not _same_place(last_two[0], last):
        return None
    return _futile(f"failed twice in the same way: {last.reason}", last.failure.traceback)


def _same_place(one: Ending, other: Ending) -> bool:
    """Return whether two incarnations failed in the same way at the same step."""
    return (one.what, one.failure.step) == (other.what, other.failure.step)


def _absent(last_two: list[Ending]) -> dict[str, Any] | None:
    """Return a reason if the same input was missing twice in a readable directory, else None."""
    last = last_two[-1]
    absent = last.failure.absent
    if len(last_two) < 2 or not absent or last_two[0].failure.absent != absent:
        return None
    why = "two starts in a row did not find this input, although they could read its directory"
    return _futile(f"{last.reason}; {why}")


def _time_limit(last_two: list[Ending], explain: Callable[[Ending], str]) -> dict[str, Any] | None:
    if len(last_two) < 2 or any(ending.warning != TIME_LIMIT for ending in last_two):
        return None
    why = explain(last_two[-1])
    text = "the time limit is too short: two jobs in a row reached it before their first commit"
    return _futile(f"{text}{'; ' if why else ''}{why}")


def _lost(endings: list[Ending], most: int) -> dict[str, Any] | None:
    """Return a reason if starts lost so many hosts that the trial may be the cause, else None."""
    lost = [ending for ending in endings if ending.lost and not ending.warning]
    if len(lost) < most:
        return None
    text = f"{len(lost)} starts in a row lost a host before their first commit"
    return _futile(f"{text}; check whether this trial makes its hosts fail")


def _too_many(vain: list[Ending], max_begins: int) -> dict[str, Any] | None:
    if len(vain) < max_begins:
        return None
    last = vain[-1]
    traceback = next(filter(None, (ending.failure.traceback for ending in reversed(vain))), "")
    why = last.reason or "its processes ended without reporting a reason"
    hang = f"; {last.hang_words}" if last.hang_words else ""
    starts = "1 start" if len(vain) == 1 else f"{len(vain)} starts in a row"
    text = f"{starts} without a new commit; the last start: {why}{hang}"
    return _futile(text, traceback)
