"""The agent's main loop: serve one incarnation after another, or supervise a rollout task.

Run ``python -m slurmrl.workers.agent --run RUN --submission N --group G [--task T]``. The agent
exits when the trial has ended, when the job is about to end, or when this host cannot continue.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.backoff import retry
from slurmrl.errors import (
    EnvironmentFailure,
    RunGoneError,
    SlurmrlError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
)
from slurmrl.fsio import atomic, calls
from slurmrl.run import hosts
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import HOST_LOSSES, TRAINERS, Cause, Failure
from slurmrl.watch import published
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.incarnation import FORM_TIMEOUT_S, Incarnation
from slurmrl.workers.agent.loss_detection import leave_without
from slurmrl.workers.agent.rollout_task import RolloutTask
from slurmrl.workers.failure import publish_loss
from slurmrl.workers.link import end_as_failed
from slurmrl.workers.polling import Presence, make_channels

logger = log.get(__name__)

LOOK_TIMEOUT_S = 60.0
"""Seconds for which a failed host waits for an answer of the directory before it exits."""
OK = 0
"""Exit code: the trial has ended, or another job has taken it over."""
FAILED = 1
"""Exit code: this job cannot continue on this host."""
AGAIN = 75
"""Exit code (EX_TEMPFAIL): the agents of this job must restart without a lost host."""


class Agent:
    """The agent's main loop on ``host``."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._served = 0
        """Number of the newest incarnation that has ended on this host."""
        self._unborn = 0
        """Number of consecutive failures before an incarnation began."""
        self._without = ""
        """Name of the host of the first agent and the batch process if it is lost, else empty."""

    def run(self) -> int:
        """Run the main loop to its end; return the exit code."""
        identity = self.host.identity
        self._take_log()
        self.host.events.write("start", host=identity.host, job=identity.job, round=env.ROUND.get())
        self.host.warnings.listen()
        code = FAILED
        try:
            code = self._serve() if identity.trains else self._roll_out()
        finally:
            self.host.close()
            self.host.events.write("end", code=code)
        if self._without:
            host = self.host
            leave_without(self._without, host.paths, host.submission, host.identity)
        return code

    def _serve(self) -> int:
        while True:
            code = self._serve_one()
            if code is not None:
                return code
            logger.info("incarnation %d has ended; waiting for the next incarnation", self._served)

    def _roll_out(self) -> int:
        """Supervise a rollout task to its end; return the exit code.

        After a failure, another task replaces this task. In the trainers' job, the supervisor
        starts the same task again.
        """
        task = RolloutTask(self.host, orphan_s=self.host.orphan_s)
        try:
            task.run()
        except TrialEndedError as end:
            logger.info("%s", end)
        except RunGoneError as error:
            logger.error("%s", error)
            return FAILED
        except SlurmrlError as error:
            if task.fail(error).cause == Cause.GPU_FAULT and not self.host.inside:
                self._give_up_host(self.host.serving)
            return FAILED
        return OK

    def _serve_one(self) -> int | None:
        """Serve one incarnation. Return the exit code, or None to serve another incarnation."""
        incarnation = Incarnation(self.host, self._served)
        failed = None
        try:
            incarnation.run()
            return OK
        except TrialEndedError as end:
            logger.info("%s", end)
            return OK
        except RunGoneError as error:
            logger.error("%s", error)
            return FAILED
        except StaleIncarnationError as error:
            logger.info("%s", error)
        except SlurmrlError as error:
            failed = incarnation.fail(error)
            if failed.cause == Cause.LOST_HOST:
                self._without = failed.host or ""
            elif failed.cause == Cause.GPU_FAULT:
                self._give_up_host(incarnation.number)
        finally:
            incarnation.close()
        self._unborn = 0 if incarnation.number else self._unborn + 1
        self._served = max(self._served, incarnation.number)
        if failed is not None and self._unborn and failed.cause == Cause.ENVIRONMENT:
            self._record_start(failed)
        return self._verdict(failed)

    def _verdict(self, failed: Failure | None) -> int | None:
        """Return the exit code after a failed incarnation, or None to serve another incarnation."""
        try:
            what = "read how the incarnation ended"
            superseded, first = retry(what, self._look, timeout_s=LOOK_TIMEOUT_S)
        except TrialEndedError as end:
            logger.info("%s", end)
            return OK
        except EnvironmentFailure as error:
            logger.error("%s", error)
            return FAILED
        if superseded:
            logger.info("the newest incarnation belongs to another job, so this job ends")
            return OK
        if failed is not None and failed.final and self._unborn:
            end_as_failed(self.host.paths, self.host.submission, failed.reason)
            return FAILED
        if self.host.warnings.received:
            logger.info("this job will end soon, so it begins no further incarnation")
            return FAILED
        ends = [failure.cause for failure in (failed, first) if failure is not None]
        if self._without or any(cause in HOST_LOSSES for cause in ends):
            return AGAIN
        if failed is not None and failed.cause == Cause.ENVIRONMENT and not failed.echo:
            return FAILED
        if self._unborn > self.host.most_failures:
            logger.error(
                "this agent gives up: it failed %d times in a row before an incarnation began",
                self._unborn,
            )
            return FAILED
        return None

    def _look(self) -> tuple[bool, Failure | None]:
        """Return whether another job began an incarnation, and the last incarnation's failure."""
        superseded = self.host.superseded(self._served)
        return superseded, published.failure(self.host.names, self._served)

    def _give_up_host(self, incarnation: int) -> None:
        """Report this host as lost, so that the job continues on its other hosts."""
        identity = self.host.identity
        try:
            publish_loss(self.host.names, identity.host, incarnation, identity.job)
        except EnvironmentFailure as error:
            logger.warning("cannot report this host as lost: %s", error)

    def _record_start(self, failed: Failure) -> None:
        """Record that an agent cannot start on this host, so that jobs use other hosts."""
        identity = self.host.identity
        start = identity.job.rpartition(".")[0]
        try:
            slots = self.host.history.count()
            hosts.record_start(self.host.paths, slots, start, identity.host, failed.reason)
        except EnvironmentFailure as error:
            logger.warning("cannot record the failed start: %s", error)

    def _take_log(self) -> None:
        """Redirect this process's output to the log of its task."""
        with retry("open a log", lambda: self.host.open_log(self.host.group.name)) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)


def serve(run: Path, submission: int, group: str, task: int | None = None) -> int:
    """Run an agent; return its exit code. For ``task``, see `Host`.

    A user error in the trainers' job ends the trial. Raises SlurmrlError if the agent cannot start
    for another reason.
    """

    def start() -> Host:
        for warning in atomic.check_ownership(run):
            logger.warning("%s", warning)
        make_channels(paths)
        return Host(paths, submission, group, task)

    paths = RunPaths(run)
    pause = Presence(paths).sleep
    try:
        host = retry("start the agent", start, pause, timeout_s=FORM_TIMEOUT_S)
    except UsageError as error:
        if group != TRAINERS:
            raise  # The trainers raise the same error and end the trial.
        end_as_failed(paths, submission, str(error))
        return FAILED
    return Agent(host).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.agent")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--task", type=int, help="number of a rollout task in the trainers' job")
    options = parser.parse_args()
    calls.set_private_umask()
    log.configure(f"agent {options.group}/{env.NODE_ID.get()}")
    return serve(options.run, options.submission, options.group, options.task)


if __name__ == "__main__":
    sys.exit(main())
