"""A user's request that a submission stops: its trainers commit, and no other job starts."""

from __future__ import annotations

from slurmrl.fsio import atomic
from slurmrl.run.paths import RunPaths


def request(run: RunPaths, number: int, by: str) -> None:
    """Record that the user ``by`` wants the submission to stop. Raises EnvironmentFailure."""
    atomic.replace(run.submission_stop(number), by.encode())


def withdraw(run: RunPaths, number: int) -> None:
    """Remove the request. Raises EnvironmentFailure."""
    atomic.remove(run.submission_stop(number))


def requested_by(run: RunPaths, number: int) -> str:
    """Return the user who wants the submission to stop; empty without a request. Raises
    CorruptFileError, EnvironmentFailure."""
    try:
        return atomic.read(run.submission_stop(number)).decode(errors="replace") or "a user"
    except FileNotFoundError:
        return ""
