"""The Python interface to trials: objects that `slurmrl.submit` and `slurmrl.trial` return."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from slurmrl.desk import trial_code, trial_jobs, trials
from slurmrl.desk.proposal import Proposal, propose, propose_resume
from slurmrl.desk.submitting import submit as start
from slurmrl.desk.trial_checks import CHECK_TIMEOUT_S, reject
from slurmrl.errors import UsageError, WaitTimeoutError
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import make
from slurmrl.watch.overview import collect

LIVES: Final = ("PENDING", "RUNNING")
"""States of a trial that continues without a command of the user."""
NO_JOB: Final = "INTERRUPTED"
POLL_S: Final = 10.0


class Trial:
    """A trial and its run directory.

    The trial does not depend on this object. `slurmrl.trial` finds it again from any process on any
    host that sees the run directory.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths

    @property
    def name(self) -> str:
        """Full name of the trial, ``EXPERIMENT/TRIAL``."""
        return self._paths.full_name

    @property
    def folder(self) -> Path:
        """Run directory of the trial."""
        return self._paths.run

    def status(self) -> dict[str, Any]:
        """Return the object that ``slurmrl status EXPERIMENT/TRIAL --json`` prints.

        Its keys include ``state``, ``step``, ``total_steps``, ``metrics``, ``diagnosis`` and
        ``findings``.

        Raises:
            EnvironmentFailure: The run directory cannot be read.
        """
        return collect([self._paths], make, detailed=True)[0]

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps so far, in order.

        Returns:
            One dictionary per step, from metric name to value. The dictionaries include results of
            separate trials that evaluate checkpoints of this trial.
        """
        return metrics.all_lines(self._paths)

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        poll_s: float = POLL_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> dict[str, Any]:
        """Wait until the trial has ended or has no job left, and return its status.

        Args:
            timeout_s: Maximum wait in seconds. Default: no limit.
            poll_s: Seconds between two reads of the status.
            sleep: Function that waits for a number of seconds.

        Returns:
            The status, as `status` returns it. ``state`` is COMPLETED, FAILED, CANCELLED or
            INTERRUPTED.

        Raises:
            WaitTimeoutError: The trial still runs after ``timeout_s`` seconds. It continues.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        doubt = True  # A single report of no job is no proof, nor is a scheduler without an answer.
        while (status := self.status())["state"] in LIVES or (doubt and status["state"] == NO_JOB):
            doubt = status["state"] != NO_JOB or "problem" in status
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{self.name} has not ended within {timeout_s:g} s: {status['diagnosis']}"
                )
            sleep(poll_s)
        return status

    def stop(self, *, wait: bool = False) -> None:
        """Stop the trial at the next step, with a commit; `resume` continues it.

        Args:
            wait: Return only after all jobs of the trial have ended.

        Raises:
            UsageError: The trial has ended or has no job.
        """
        jobs = trial_jobs.stop(self._paths)
        if wait:
            trial_jobs.wait_until_stopped(self._paths, jobs)

    def cancel(self) -> None:
        """Cancel the trial and its jobs at once.

        Checkpoints remain. Steps after the last checkpoint are lost; use `stop` to commit them
        first. A trial that has ended keeps its state.

        Raises:
            EnvironmentFailure: The scheduler did not accept the request.
        """
        trial_jobs.cancel(self._paths)

    def resume(self, *overrides: str, check: bool = True) -> None:
        """Continue the trial from its last commit, as ``slurmrl resume`` does.

        Args:
            overrides: Strings ``dotted.key=value``. Overrides may change the layout and
                settings that do not affect results.
            check: Check data, weights, tokenizer and reward before the first job is queued.

        Raises:
            ConfigError: An override is invalid, or would change the result of the trial.
            UsageError: The trial has jobs, or was submitted with another version of slurmrl. The
                command ``slurmrl resume`` continues such a trial with its own version.
        """
        if not trial_code.is_this_code(trial_code.current_code(self._paths)):
            raise UsageError(
                f"{self.name} runs another version of slurmrl, which must write its own files: use "
                f"slurmrl resume {self.name}"
            )
        _start(propose_resume(self._paths, overrides), check=check)

    def __repr__(self) -> str:
        return f"Trial({self.name!r}, {str(self.folder)!r})"


def submit(
    config: Path,
    overrides: Sequence[str],
    *,
    root: str | None,
    scheduler: str | None,
    new: bool,
    check: bool,
) -> Trial:
    """Submit a trial (see `slurmrl.submit`)."""
    proposal = propose(config, overrides, root=root, scheduler=scheduler, new=new)
    return Trial(_start(proposal, check=check))


def find(name: str, root: str | None) -> Trial:
    """Return an existing trial (see `slurmrl.trial`)."""
    return Trial(trials.find(trials.root_folder(root), name))


def _start(proposal: Proposal, *, check: bool) -> RunPaths:
    reject(proposal.check(CHECK_TIMEOUT_S if check else None))
    return start(proposal).paths
