"""The keys of a trial's name store; the keys of an incarnation contain its number."""

from __future__ import annotations

ATTEMPTS = "attempt"
"""Root of all claims."""


def attempt(group: str, task: int, number: int) -> str:
    """Claim of one start of a task; the value has its job, host and process."""
    return f"attempt/{group}/{task}/{number}"


def attempts(group: str, task: int) -> str:
    return f"attempt/{group}/{task}"


def incarnation(number: int) -> str:
    """Root of one incarnation's keys."""
    return f"incarnation/{number}"


def attempt_failures(group: str) -> str:
    """Root of the failures of attempts at a group's tasks."""
    return f"failed/{group}"


def attempt_failure(group: str, task: int, number: int) -> str:
    """Failure of one start of a rollout task, as JSON."""
    return f"{attempt_failures(group)}/{task}.{number}"


def group_attempts(group: str) -> str:
    return f"attempt/{group}"


def failure(incarnation: int) -> str:
    """The first failure of an incarnation, as JSON. Later failures cannot replace it."""
    return f"incarnation/{incarnation}/failure"


def warned(incarnation: int) -> str:
    """Warning that the job of an incarnation will end: signal, cause and time left, as JSON."""
    return f"incarnation/{incarnation}/warned"


def leader_locks() -> str:
    """Root of the leader locks: the jobs that took over the trial, in order.

    Its name must not change: jobs of an older slurmrl and jobs resumed with ``--update-code`` use
    it to exclude each other.
    """
    return "baton"


def leader_lock(number: int) -> str:
    """The ``number``-th job that took over the trial, as JSON. If several add it, one succeeds."""
    return f"{leader_locks()}/{number}"


def hang(incarnation: int) -> str:
    """Key of the ranks that waited when silence or a deadline ended an incarnation.

    Its value is JSON: ``text`` says which ranks waited for which, and ``files`` lists files with
    stacks.
    """
    return f"incarnation/{incarnation}/hang"


def stacks(incarnation: int, number: int) -> str:
    """The ``number``-th request for stacks, counted from 1, as JSON: ``ranks`` (null: all)."""
    return f"incarnation/{incarnation}/stacks/{number}"


def lost(host: str) -> str:
    """Key of a host whose agent is dead or whose GPU failed.

    Its value is JSON: the incarnation that detected the loss, and its job.
    """
    return f"lost/{host}"


def status() -> str:
    """The master's latest status of the run; replaced periodically."""
    return "status"
