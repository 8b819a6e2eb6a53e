"""The exceptions of slurmrl, with exit codes. Most derive from a standard exception.

Subclasses keep all their values in ``args``, so that the default pickling works.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SlurmrlError(Exception):
    """Base of all errors that slurmrl raises; commands print its message without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RunFailedError(SlurmrlError, RuntimeError):
    """The run itself failed (a call raised, or there was no progress)."""


class ReportedError(RunFailedError):
    """An error that carries a failure to the process that publishes the failure.

    ``failure`` is a `run.reports.Failure`; its ``reason`` is the message.
    """

    def __init__(self, failure: Any) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return str(self.failure.reason)


class UsageError(SlurmrlError, ValueError):
    """User error: the request is not allowed or cannot be fulfilled."""

    exit_code = 2


class UnreadableInputError(UsageError):
    """A file, folder or module that the configuration names is missing or cannot be read.

    On the login node, the error is the user's fault. Jobs start only after the login node has found
    the file, so workers, agents and the master treat the error like an `EnvironmentFailure` and
    retry. ``args``: the message and `absent`.
    """

    @property
    def absent(self) -> str:
        """The path, if it certainly does not exist; empty if a mount may be missing."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class RejectedError(UsageError):
    """A server refuses a request. ``args``: the message and `status`."""

    @property
    def status(self) -> int:
        """HTTP status code of the response."""
        return int(self.args[1])


class UnreachableHubError(UsageError):
    """The Hugging Face hub cannot be reached from this host."""


class UnknownNameError(UsageError, LookupError):
    """A name is not in its table; the message lists the known names."""


class Problem(NamedTuple):
    """One problem of a configuration."""

    where: str
    """File and line, ``ppo.yaml:12``, or ``command line``."""
    key: str
    """Dotted key, ``actor.backend``; empty for the file as a whole."""
    message: str
    """The value, the rule, and the allowed values."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(UsageError):
    """A configuration has problems; all of them are reported at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class ChatTemplateError(UsageError):
    """A chat template cannot render a conversation, or its output does not separate the turns."""


class RewardError(UsageError):
    """A reward function broke its contract or cannot score a row of the data."""


class EpisodeLimitError(SlurmrlError, RuntimeError):
    """An episode has no turns or tokens left: it ends unfinished, which is no failure."""


class EpisodeError(SlurmrlError, RuntimeError):
    """All episodes of a call failed; the message has the last reason."""


class UnusableRowError(RewardError):
    """A reward function cannot score a row. ``args``: the reason, the row's index in the call."""

    @property
    def index(self) -> int:
        return int(self.args[1])


class AllocationError(UsageError):
    """An allocation string is not valid.

    ``args``: the message; for a string with a syntax error also `position` and `reason`.
    """

    @property
    def position(self) -> int | None:
        """Index of the character that is not allowed; None without a syntax error."""
        return int(self.args[1]) if len(self.args) > 1 else None

    @property
    def reason(self) -> str:
        """The message without the allocation string and the position."""
        return str(self.args[2]) if len(self.args) > 2 else str(self)


class GraphError(UsageError):
    """The calls of an algorithm do not fit together. ``args``: all problems."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class MoveError(SlurmrlError, RuntimeError):
    """After a move, replicas of a tensor differ between ranks; the message names tensor and box."""


class EnvironmentFailure(SlurmrlError, OSError):  # noqa: N818 - it is also an OSError by nature
    """The machine, the cluster or the shared directory failed or lacks something."""

    exit_code = 3


class UnusableGpuError(EnvironmentFailure):
    """torch cannot use the GPU of this worker; a GPU of another host may be fine."""


class OwnershipError(EnvironmentFailure):
    """Another user could change the contents of a directory, so slurmrl does not use it."""


class SchedulerError(EnvironmentFailure):
    """A scheduler command failed, or its output could not be parsed."""


class NameExistsError(SlurmrlError, FileExistsError):
    """A key cannot be added to the name store because it exists already."""


class NameNotFoundError(SlurmrlError, LookupError):
    """A key of the name store does not exist."""


class InvalidNameError(UsageError):
    """The name store rejects a key or a value (too long, empty, control characters)."""


class WaitTimeoutError(SlurmrlError, TimeoutError):
    """A wait timed out; the message names the missing event."""


class SlotTakenError(SlurmrlError, RuntimeError):
    """Another writer has taken the history slot ``args[0]``; the caller must read the history."""

    def __str__(self) -> str:
        return f"history slot {self.args[0]} is taken"


class StaleIncarnationError(SlurmrlError, RuntimeError):
    """A newer incarnation of the trial has begun: the process must stop at once."""


class RunGoneError(SlurmrlError, RuntimeError):
    """The run directory was removed: the process must stop at once."""


class TrialEndedError(SlurmrlError, RuntimeError):
    """The trial has already ended, according to its history."""


class CorruptFileError(SlurmrlError, ValueError):
    """One of slurmrl's own files is damaged."""


class CheckpointError(SlurmrlError, RuntimeError):
    """A checkpoint is missing, is incomplete or does not match the run."""


class DamagedCheckpointError(CheckpointError):
    """A committed checkpoint was changed after it was written.

    ``args``: the message, the name of its directory in ``checkpoints/``, and `may_pass`.
    """

    @property
    def directory(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else ""

    @property
    def may_pass(self) -> bool:
        """Whether the cause may be temporary: a stale cache or I/O errors of a file server."""
        return bool(self.args[2]) if len(self.args) > 2 else False


class WeightVersionError(SlurmrlError, RuntimeError):
    """A weight version is missing, unfinished or damaged; its readers use another version."""


class SampleFileError(SlurmrlError, RuntimeError):
    """Samples of a rollout task are missing or damaged; they must be generated again."""


class LayoutError(SlurmrlError, ValueError):
    """Two layouts do not match, or a layout is incomplete."""


class WorkerDiedError(SlurmrlError, RuntimeError):
    """A child process exited unexpectedly."""


class MissingDependencyError(SlurmrlError, ImportError):
    """An optional package is not installed; the message says how to install it."""

    exit_code = 3
