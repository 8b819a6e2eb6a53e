"""The newest incarnations of a trial and their ends.

An incarnation may be killed at any moment. The functions infer the end of an incarnation from its
reports (see `Ending`), the history, the master's last event and the scheduler's state of the job,
as far as these exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeAlias

from slurmrl.display.terminal import first_line, plain
from slurmrl.run.events import Event
from slurmrl.run.history.slots import Kind
from slurmrl.run.metrics import TIME
from slurmrl.run.reports import Ending, Failure, JobTag, Warned, failure_words
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.watch.snapshot import Traces, TrialSnapshot

WARNINGS = {
    "time_limit": "time limit",
    "preemption": "preempted or killed ({signal})",
    "interrupt": "interrupted ({signal})",
    "unknown": "warned of its end ({signal})",
}
PREEMPTED = "preempted ({signal})"
"""Words for a warning if the scheduler confirms the preemption."""
CLOCKS_S = 5.0
"""Maximum difference of two hosts' clocks."""
SHOWN_FILES = 2
REPEATS: Final = "repeats"
"""Event of an incarnation about the steps that it repeats. Fields: ``first``, ``last``."""
GUESSED = ("preemption", "unknown")
JOB_ENDS = {
    JobState.TIMEOUT: "time_limit",
    JobState.PREEMPTED: "preemption",
    JobState.NODE_FAIL: "lost_host",
    JobState.OUT_OF_MEMORY: "oom",
    JobState.CANCELLED: "interrupt",
    JobState.FAILED: "killed",
}


RowEnd: TypeAlias = tuple[str, str]
"""The fields ``cause`` and ``how`` of a row (see `status`)."""


def rows(
    snapshot: TrialSnapshot, tasks: Sequence[TaskState], past: Sequence[TaskState], state: str
) -> list[dict[str, Any]]:
    """Return one row per incarnation, the oldest first.

    ``tasks`` belong to jobs that may run, ``past`` to jobs of other submissions.
    """
    each = zip_longest(snapshot.incarnations, snapshot.incarnations[1:])
    return [_row(snapshot, one, after, tasks, past, state) for one, after in each]


def is_unclear(traces: Traces) -> bool:
    """Return whether only the scheduler may know how an incarnation ended."""
    end = traces.begun.end
    finished = end is not None and end.kind is Kind.FINISHED
    guessed = traces.warned is None or traces.warned.cause in GUESSED
    return not finished and traces.failure is None and guessed


def last_word(traces: Traces) -> float:
    """Return the time of an incarnation's last recorded activity, by the writers' clocks.

    A cancellation does not count, because the user may cancel the trial long afterwards.
    """
    times = [float(event["time"]) for event in (*traces.master, *traces.agent)]
    end = traces.begun.end
    cancelled = end is not None and end.kind is Kind.CANCELLED
    records = (traces.begun.commit, None if cancelled else end)
    return max([*times, traces.begun.time, *(one.time for one in records if one is not None)])


def _ended_at(traces: Traces, after: Traces | None) -> float:
    """Return the time at which an incarnation ended, in seconds since the epoch.

    If the next incarnation is in the same start of the job, this is the time at which it began.
    """
    if after is not None and _tag(traces).start == _tag(after).start != "":
        return after.begun.time
    return last_word(traces)


def _tag(traces: Traces) -> JobTag:
    return JobTag.of(traces.begun.data)


def _reported(traces: Traces, after: Traces | None) -> Ending:
    """Return the end of an incarnation from its reports. ``after`` is the next incarnation."""
    return Ending(
        traces.begun.number,
        job=_tag(traces),
        failure=traces.failure or Failure(),
        warned=traces.warned,
        hang=traces.hang,
        requeued=after is not None and _tag(traces).is_requeued_as(_tag(after)),
    )


def _row(
    snapshot: TrialSnapshot,
    traces: Traces,
    after: Traces | None,
    tasks: Sequence[TaskState],
    past: Sequence[TaskState],
    state: str,
) -> dict[str, Any]:
    begun, newest = traces.begun, traces.begun.number == snapshot.state.incarnation
    running = newest and state == "RUNNING" and traces.failure is None and _in_job(traces, tasks)
    reported = _reported(traces, after)
    cause, how = _running(snapshot) if running else ending(traces, reported, [*tasks, *past])
    until = float(snapshot.said.get("time", snapshot.now)) if running else _ended_at(traces, after)
    commit = begun.commit.data["step"] if begun.commit else None
    first = _from_step(traces)
    last = max(_to_step(traces, commit), _last_seen(snapshot, traces, after, running=running))
    kept = max(first, first if commit is None else commit)
    return {
        "number": begun.number,
        "job_id": traces.attempt.job_id if traces.attempt is not None else None,
        "submission": begun.data.get("submission"),
        "link": begun.data.get("link"),
        "hosts": hosts(snapshot, traces),
        "began": begun.time,
        "from_step": first,
        "to_step": last,
        "commit": commit,
        "lost_steps": 0 if running else last - kept,
        "cause": cause,
        "how": how + reported.damages,
        "seconds": max(until - begun.time, 0.0),
    }


def _in_job(traces: Traces, tasks: Sequence[TaskState]) -> bool:
    """Return whether an incarnation can belong to a job that runs now.

    Otherwise its job has ended, and the next job has not begun an incarnation yet.
    """
    job_id = traces.attempt.job_id if traces.attempt is not None else ""
    running = {task.job_id: task for task in tasks if task.state is JobState.RUNNING}
    if not running or not job_id:
        return True  # the job is unknown: assume that it runs
    return job_id in running and is_start_of(running[job_id], _tag(traces))


def is_start_of(task: TaskState, tag: JobTag) -> bool:
    """Return whether a tag belongs to an element's newest start, not to an earlier start."""
    return tag.restarts is None or task.restarts <= tag.restarts


def _running(snapshot: TrialSnapshot) -> RowEnd:
    phase = snapshot.said.get("phase", "starting")
    return ("running", "starting" if phase == "starting" else "running")


def _from_step(traces: Traces) -> int:
    ready = _newest(traces.master, "ready")
    step = ready.get("step") if ready else traces.begun.base
    return step if isinstance(step, int) else 0


def _last_seen(
    snapshot: TrialSnapshot, traces: Traces, after: Traces | None, *, running: bool
) -> int:
    """Return the last step of an incarnation; 0 if unknown.

    The source is the first of these that applies:

    - the status, for a running incarnation
    - the event of the next incarnation about the steps that it repeats
    - the lines of metrics, if there is no next incarnation
    """
    if running:
        said = snapshot.said.get("step")
    elif after is not None:
        repeats = _newest(after.master, REPEATS) or {}
        said = repeats.get("last")
    else:
        own = [line for line in snapshot.lines if _time(line) >= traces.begun.time]
        said = own[-1]["step"] if own else 0
    return said if isinstance(said, int) else 0


def last_line(snapshot: TrialSnapshot) -> float:
    """Return the time of the newest line of metrics, in seconds since the epoch; 0 if unknown."""
    return _time(snapshot.lines[-1]) if snapshot.lines else 0.0


def _time(line: Mapping[str, Any]) -> float:
    said = line.get(TIME)
    return float(said) if isinstance(said, int | float) else 0.0


def _to_step(traces: Traces, commit: int | None) -> int:
    ends = [event.get("step") for event in traces.master if event["kind"] in ("stopped", "commit")]
    failed = traces.failure.step if traces.failure is not None else None
    before = failed - 1 if failed is not None else None
    steps = [*ends, before, commit, _from_step(traces)]
    return max(step for step in steps if isinstance(step, int))


def hosts(snapshot: TrialSnapshot, traces: Traces) -> list[str]:
    """Return the known hosts of an incarnation."""
    tag = _tag(traces).text
    for event in reversed([event for event in traces.supervisor if event["kind"] == "round"]):
        if tag.endswith(f".{event.get('round')}") and event.get("hosts"):
            return list(event["hosts"])
    agents = [agent for agent in snapshot.attempts.values() if tag and agent.job == tag]
    if not agents and traces.attempt is not None:
        agents = [traces.attempt]
    return list(dict.fromkeys(agent.host for agent in agents if agent.host))


def ending(traces: Traces, reported: Ending, tasks: Sequence[TaskState]) -> RowEnd:
    """Return the cause and the description of the end of an incarnation."""
    if traces.begun.end is not None and traces.begun.end.kind is Kind.FINISHED:
        return ("finished", "finished")
    if reported.is_own_fault:
        return (reported.cause, failure_words(reported.failure) + _explained(reported))
    if _was_cancelled(traces):
        return _cancelled(traces)
    if reported.warned is not None:
        preempted = reported.requeued or _was_preempted(traces, tasks)
        end = _contradicted(traces, tasks, reported.warned)
        return end or _warned(traces, reported.warned, preempted=preempted)
    if reported.cause:
        return (reported.cause, failure_words(reported.failure))
    return _unsaid(traces) or _by_scheduler(traces, tasks) or _silent(traces)


def _explained(reported: Ending) -> str:
    """Return a phrase about a hang: which ranks waited for which, and the files with stacks."""
    if reported.hang is None:
        return ""
    text = reported.hang_words
    files = [plain(name) for name in reported.hang.files]
    more = f" and {len(files) - SHOWN_FILES} more" if files[SHOWN_FILES:] else ""
    stacks = f"stacks in {', '.join(files[:SHOWN_FILES])}{more}" if files else ""
    return "".join(f"; {part}" for part in (text, stacks) if part)


def warning(warned: Warned, *, preempted: bool = False) -> str:
    """Describe the warning that an incarnation's job would end.

    ``preempted`` is true if the scheduler confirms that the job was preempted.
    """
    words = WARNINGS.get(warned.cause, WARNINGS["unknown"])
    if preempted and warned.cause == "preemption":
        words = PREEMPTED
    return words.format(signal=warned.signal or "a signal")


def _was_preempted(traces: Traces, tasks: Sequence[TaskState]) -> bool:
    """Return whether the scheduler reports a preemption, or has started the job again.

    The scheduler does not start a killed job again.
    """
    element = traces.attempt.job_id if traces.attempt is not None else ""
    own = [task for task in tasks if element and task.job_id == element]
    return any(
        not is_start_of(task, _tag(traces)) or (task.ending or task.state) is JobState.PREEMPTED
        for task in own
    )


def _warned(traces: Traces, warned: Warned, *, preempted: bool) -> RowEnd:
    cause, words = warned.cause or "unknown", warning(warned, preempted=preempted)
    stopped = _newest(traces.master, "stopped")
    if stopped:
        return (cause, f"{words}, handed over at step {stopped.get('step')}")
    return (cause, words if traces.begun.commit else f"{words}, before it could commit")


def _unsaid(traces: Traces) -> RowEnd | None:
    """Return the end of an incarnation that published no failure, from its other traces."""
    if traces.begun.end is not None:
        if traces.begun.end.kind is Kind.CANCELLED:
            return _cancelled(traces)
        return ("gave_up", f"gave up: {first_line(traces.begun.end.data.get('reason'))}")
    if stopped := _newest(traces.master, "stopped"):
        return ("interrupt", f"interrupted, handed over at step {stopped.get('step')}")
    if failed := _newest(traces.master, "failed"):
        return ("master", first_line(failed.get("reason")) or "the master failed")
    return None


def _was_cancelled(traces: Traces) -> bool:
    """Return whether the trial was cancelled while the incarnation ran.

    The signal that the job received does not show a cancellation.
    """
    end = traces.begun.end
    if end is None or end.kind is not Kind.CANCELLED:
        return False
    return end.time < last_word(traces) + CLOCKS_S


def _cancelled(traces: Traces) -> RowEnd:
    end = traces.begun.end
    return ("cancelled", (first_line(end.data.get("reason")) if end else "") or "cancelled")


def _by_scheduler(traces: Traces, tasks: Sequence[TaskState]) -> RowEnd | None:
    """Return the end that the scheduler's state of the job shows; None if it shows no end.

    The state of an element that waits or runs shows an end only while the element is ending.
    """
    task = _task(traces, tasks)
    cause = JOB_ENDS.get(task.ending or task.state) if task else None
    if task is None or cause is None:
        return None
    return (cause, f"job {task.job_id}: {task.words or task.reason or task.state.value}")


def _task(traces: Traces, tasks: Sequence[TaskState]) -> TaskState | None:
    """Return the array element in which an incarnation ran; None if it was requeued afterwards.

    The state of a requeued element belongs to a later start.
    """
    job_id = traces.attempt.job_id if traces.attempt is not None else ""
    found = (task for task in tasks if job_id and task.job_id == job_id)
    return next((task for task in found if is_start_of(task, _tag(traces))), None)


def _contradicted(traces: Traces, tasks: Sequence[TaskState], warned: Warned) -> RowEnd | None:
    """Return the scheduler's reason if it contradicts a reason guessed from a signal.

    Steps of a killed or cancelled job get the same signals as the steps of a preempted job.
    """
    task = _task(traces, tasks)
    if warned.cause not in GUESSED or task is None:
        return None
    if (task.ending or task.state) is JobState.FAILED and task.signal is None:
        return None  # slurmrl itself exited with this code after the warning.
    end = _by_scheduler(traces, tasks)
    return end if end is not None and end[0] != warned.cause else None


def _silent(traces: Traces) -> RowEnd:
    end, last = _newest(traces.supervisor, "end"), _newest(traces.supervisor, "round")
    if last and not _tag(traces).text.endswith(f".{last.get('round')}"):  # The job went on.
        return ("killed", "its agents were killed (scancel of their step?), and the job continued")
    if end:
        return ("unknown", f"its agents ended: {end.get('why') or end.get('code')}")
    return ("killed", "ended without a report: its batch process or host was killed")


def _newest(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event["kind"] == kind), None)
