"""Ends of incarnations, read from the reports of their processes. Pure functions.

The master uses it to decide whether to start again (`workers.master.judgement`), and the status
shows it (`watch.incarnation_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurmrl.display.terminal import exit_words, first_line, plain
from slurmrl.run.reports import Cause, Failure, Hang, Report, Warned

HOST_LOSSES = (Cause.LOST_HOST, Cause.GPU_FAULT)
"""Failures after which a job continues without the host."""
HANGS = (Cause.HUNG, Cause.DEADLINE)
"""Failures for which agents collect stacks, to explain who waited for whom."""
RAISED = (Cause.EXCEPTION, Cause.MASTER)
"""Failures raised by code of a worker or the master, which would probably raise them again."""
OWN_FAULTS = (*RAISED, *HANGS, Cause.GPU_FAULT, Cause.OOM)
"""Failures that explain an end better than a warning that the same job received."""
UNFAULTED = ("preemption", "interrupt")
"""Warnings of ends that the trial did not cause, which do not count as failed starts."""
MOST_WORDS = 200
"""Maximum length of the failure of a rollout task, in characters."""


@dataclass(frozen=True)
class JobTag:
    """The name of a round of agents: ``JOBID.RESTARTCOUNT.ROUND``; empty if unknown."""

    text: str = ""

    @classmethod
    def of(cls, begin: Mapping[str, Any]) -> JobTag:
        """Return the tag of the round that the data of a BEGIN record names."""
        return cls(str(begin.get("job") or ""))

    @property
    def job(self) -> str:
        return self.text.partition(".")[0]

    @property
    def start(self) -> str:
        """Start of the job, as ``JOBID.RESTARTCOUNT``."""
        return ".".join(self.text.split(".")[:2])

    @property
    def restarts(self) -> int | None:
        """Number of times that Slurm has requeued the job; None if unknown."""
        count = self.start.partition(".")[2]
        return int(count) if count.isdecimal() else None

    def is_requeued_as(self, after: JobTag) -> bool:
        """Return whether ``after`` is a later start of the same job."""
        return self.job == after.job and self.start != after.start


@dataclass(frozen=True)
class Ending:
    """The end of an incarnation, as far as it was reported."""

    incarnation: int
    job: JobTag = JobTag()
    failure: Failure = field(default_factory=Failure)
    """Its first failure; `Failure()` if nothing was reported."""
    warned: Warned | None = None
    """The warning that its job would end."""
    hang: Hang | None = None
    requeued: bool = False
    """Whether Slurm has since requeued its job, or ended the job together with its host."""
    repeated: bool = False
    """Whether the failure is a GPU fault that occurred again on other hosts."""
    shared_loss: bool = False
    """Whether the next incarnation in the same start of the job was lost with its host. Then this
    one was lost with it too."""

    @property
    def cause(self) -> str:
        return cause_of(self.failure)

    @property
    def what(self) -> str:
        """The first failure, without the rank; empty if nothing failed.

        The rank is omitted, because which of several ranks fails first is random.
        """
        failure = self.failure
        what = failure.exception or failure.reason or failure.damage
        if not what:
            return "" if failure == Failure() else "unknown"
        return f"{failure.call}: {what}" if self._names_rank else what

    @property
    def reason(self) -> str:
        """The first failure, with the rank."""
        return f"rank {self.failure.rank}, {self.what}" if self._names_rank else self.what

    @property
    def _names_rank(self) -> bool:
        return self.failure.rank is not None and bool(self.failure.call)

    @property
    def warning(self) -> str:
        """The cause of the warning; empty without one."""
        return self.warned.cause if self.warned is not None else ""

    @property
    def hang_words(self) -> str:
        """One line that says which ranks waited for which.

        It is only for display, because its times differ between incarnations.
        """
        return first_line(self.hang.text) if self.hang is not None else ""

    @property
    def is_own_fault(self) -> bool:
        """Whether the failure explains the end better than a warning does."""
        return self.cause in OWN_FAULTS

    @property
    def lost(self) -> bool:
        """Whether the incarnation was lost together with a host."""
        taken = self.requeued and (not self.reason or self.failure.echo)
        remedied = self.cause in HOST_LOSSES and not self.repeated
        return taken or self.shared_loss or remedied

    @property
    def counts(self) -> bool:
        """Whether the ending counts as a failed start.

        It does not count if Slurm took the job away, or if the incarnation could not read the
        checkpoint from which it resumed.
        """
        return not (self.lost or self.warning in UNFAULTED or self.failure.damaged)

    @property
    def damages(self) -> str:
        """Description of damaged reports about this end; empty if all are readable."""
        reports: tuple[Report | None, ...] = (self.failure, self.warned, self.hang)
        damages = (report.damage for report in reports if report is not None)
        return "".join(f"; {damage}" for damage in damages if damage)


def cause_of(failure: Failure) -> str:
    """Return the cause, which very old versions did not report; empty if nothing was reported."""
    if failure.cause:
        return failure.cause
    if failure.exception or failure.traceback:
        return Cause.EXCEPTION
    return "unknown" if failure.reason else ""


def failure_words(failure: Failure) -> str:
    """Return the failure on one line."""
    reason = first_line(failure.exception or failure.reason)
    host = f" on {failure.host}" if failure.host else ""
    worker = f"a process{host}" if failure.rank is None else f"rank {failure.rank}{host}"
    match cause_of(failure):
        case Cause.DIED if failure.rank is None and reason:
            return reason  # the message names the fork server and the failed import
        case Cause.DIED:
            code = failure.exit_code
            return f"{worker} died: {reason if code is None else exit_words(code)}"
        case Cause.OOM:
            return f"{worker} was killed: out of memory"
        case Cause.HUNG:
            return f"{worker} hung{_silence(failure, reason)}{_where(failure)}"
        case Cause.LOST_HOST:
            return f"host {failure.host or '(unknown)'} lost"
        case Cause.GPU_FAULT:
            return f"{worker}: {plain(failure.gpu) or 'its GPU'} failed: {reason}"
        case Cause.EXCEPTION if failure.rank is not None:
            return f"{worker}: {reason}{_where(failure)}"
        case Cause.DEADLINE:
            return f"too slow: {reason}"
        case Cause.ENVIRONMENT:
            return f"cannot continue{host}: {reason}"
        case cause:
            return reason or cause


def attempt_failure_words(failure: Failure) -> str:
    """Return the failure of an attempt at a rollout task, without the host, on one short line."""
    words = failure_words(replace(failure, host="")) + failure.damage
    return words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS - 1]}…"


def _silence(failure: Failure, reason: str) -> str:
    """Return how long a process was silent; if a report lacks this, its reason."""
    if failure.silent_s is not None:
        return f": no heartbeat for {failure.silent_s:g} s"
    return f": {reason}" if reason else ""


def _where(failure: Failure) -> str:
    """Return ``, train_step of step 4``."""
    step = "" if failure.step is None else f"step {failure.step}"
    place = " of ".join(part for part in (failure.call, step) if part)
    return f", {place}" if place else ""
