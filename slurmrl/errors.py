"""The exception tree. Each error is also the fitting standard type, has an exit code, and pickles.

Subclasses keep everything they carry in ``args``, so that the default pickling works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class SlurmrlError(Exception):
    """Base of every error that slurmrl raises on purpose; the command line prints one message."""

    exit_code = 1


class RunFailedError(SlurmrlError, RuntimeError):
    """The run itself failed (a call raised, or no progress was made). ``args[1]``, where there is
    one, is what is known of it (see `workers.failure`)."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    @property
    def failure(self) -> Mapping[str, Any]:
        return self.args[1] if len(self.args) > 1 else {}


class UsageError(SlurmrlError, ValueError):
    """The user asked for something that is not allowed."""

    exit_code = 2


class UnknownNameError(UsageError, LookupError):
    """A name that is not in its table; the message lists the known ones."""


class Problem(NamedTuple):
    """One thing that is wrong in a configuration."""

    where: str
    """File and line, ``ppo.yaml:12``, or ``command line``."""
    key: str
    """Dotted key, ``actor.backend``; empty for the file as a whole."""
    message: str
    """The value, the rule, and what is allowed."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(UsageError):
    """A configuration with problems; all of them are reported at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RewardError(UsageError):
    """A reward function did not do what it must, or cannot judge a row of the data."""


class UnusableRowError(RewardError):
    """A reward function cannot judge one row. ``args``: why, and the row's index in its call."""

    @property
    def index(self) -> int:
        return int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


class AllocationError(UsageError):
    """An allocation string that is not allowed."""


class EnvironmentFailure(SlurmrlError, OSError):  # noqa: N818 - it is also an OSError by nature
    """The machine, the cluster or the shared directory cannot do what is needed."""

    exit_code = 3

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class OwnershipError(EnvironmentFailure):
    """Others could change what a directory holds, so it is not used."""


class SchedulerError(EnvironmentFailure):
    """A scheduler command failed or its answer was not understood."""


class NameExistsError(SlurmrlError, FileExistsError):
    """An exclusive add met a key that exists."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NameNotFoundError(SlurmrlError, LookupError):
    """A key that does not exist."""


class InvalidNameError(UsageError):
    """A key or a value that the store does not take (too long, empty, control characters)."""


class WaitTimeoutError(SlurmrlError, TimeoutError):
    """A bounded wait ran out; the message names what was missing."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SlotTakenError(SlurmrlError, RuntimeError):
    """Somebody else won the history slot in ``args[0]``; whoever wanted it must read again."""

    def __str__(self) -> str:
        return f"history slot {self.args[0]} is taken"


class StaleIncarnationError(SlurmrlError, RuntimeError):
    """A newer incarnation of the trial has begun: whoever sees this must stop at once."""


class RunGoneError(SlurmrlError, RuntimeError):
    """The run directory was removed: whoever works for it must stop at once."""


class TrialEndedError(SlurmrlError, RuntimeError):
    """The history already holds an end of the trial."""


class CorruptFileError(SlurmrlError, ValueError):
    """A file of ours holds bytes that we cannot have written."""


class CheckpointError(SlurmrlError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit."""


class DamagedCheckpointError(CheckpointError):
    """A committed checkpoint is not as it was written. ``args``: the message, and the name of its
    folder in ``checkpoints/``."""

    @property
    def directory(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else ""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class LayoutError(SlurmrlError, ValueError):
    """Two layouts do not fit together, or a layout is not whole."""


class WorkerDiedError(SlurmrlError, RuntimeError):
    """A child process ended when it should not have."""


class MissingDependencyError(SlurmrlError, ImportError):
    """An optional package is not installed; the message says how to install it."""

    exit_code = 3
