"""The keys of a trial's name store. The keys of an incarnation contain its number."""

from __future__ import annotations

ATTEMPTS = "attempt"
"""Root of all claims."""


def attempt(group: str, task: int, number: int) -> str:
    """Return the key that claims one start of a task. The value names job, host and process."""
    return f"attempt/{group}/{task}/{number}"


def attempts(group: str, task: int) -> str:
    return f"attempt/{group}/{task}"


def incarnation(number: int) -> str:
    """Return the root of one incarnation's keys."""
    return f"incarnation/{number}"


def attempt_failures(group: str) -> str:
    """Return the root of the failures of attempts at a group's tasks."""
    return f"failed/{group}"


def attempt_failure(group: str, task: int, number: int) -> str:
    """Return the key for the failure of one start of a rollout task. The value is JSON."""
    return f"{attempt_failures(group)}/{task}.{number}"


def group_attempts(group: str) -> str:
    return f"attempt/{group}"


def failure(incarnation: int) -> str:
    """Return the key of an incarnation's first failure, which later failures cannot replace."""
    return f"incarnation/{incarnation}/failure"


def warned(incarnation: int) -> str:
    """Return the key of the warning that the job of an incarnation will end.

    The value is JSON with the signal, the cause and the remaining time.
    """
    return f"incarnation/{incarnation}/warned"


def leader_locks() -> str:
    """Return the root of the leader locks.

    The locks name the jobs that took over the trial, in order. Never change this name: jobs of an
    older slurmrl and jobs resumed with ``--update-code`` use it to exclude each other.
    """
    return "baton"


def leader_lock(number: int) -> str:
    """Return the key of the ``number``-th leader lock, which only one job can add."""
    return f"{leader_locks()}/{number}"


def hang(incarnation: int) -> str:
    """Return the key of the report on who waited when silence or a deadline ended an incarnation.

    The value is JSON: ``text`` explains the waits between ranks, and ``files`` lists files with
    stacks.
    """
    return f"incarnation/{incarnation}/hang"


def stacks(incarnation: int, number: int) -> str:
    """Return the key of the ``number``-th request for stacks, counted from 1.

    The value is JSON with the ``ranks``; null means all ranks.
    """
    return f"incarnation/{incarnation}/stacks/{number}"


def lost(host: str) -> str:
    """Return the key of a host whose agent is dead or whose GPU failed.

    The value is JSON: the incarnation that detected the loss, and its job.
    """
    return f"lost/{host}"


def status() -> str:
    """Return the key of the run's status, which the master replaces periodically."""
    return "status"
