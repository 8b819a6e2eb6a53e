"""The batch process of one job: starts the agents, relays warnings, and leaves when they end.

``python -m slurmrl.workers.supervisor --run RUN --submission N --group G --launcher srun|direct``
is the last line of the batch script, so signals that Slurm sends to the batch process arrive here.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from slurmrl import env, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import ownership
from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.monitor.snapshot import newest_submission
from slurmrl.paths import RunPaths
from slurmrl.scheduler import make
from slurmrl.workers.process import die_with

logger = log.get(__name__)

SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.supervisor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--launcher", choices=("srun", "direct"), default="direct")
    return parser.parse_args(arguments)


def reason_to_leave(paths: RunPaths, submission: int) -> str | None:
    """Why this job has nothing to do, or None: an ended trial, or a newer submission."""
    end = fold(History(paths.history).read()).end
    if end is not None:
        return f"the trial has ended ({end.kind})"
    newest = newest_submission(paths)
    if newest is not None and newest.number > submission:
        return f"submission {submission} was followed by a newer one"
    return None


def agent_command(options: argparse.Namespace) -> list[str]:
    agent = [sys.executable, "-P", "-m", "slurmrl.workers.agent"]
    agent += ["--run", str(options.run), "--submission", str(options.submission)]
    agent += ["--group", options.group]
    if options.launcher == "direct":
        return agent
    # --export=ALL hands on what the batch script's set-up lines made; a lost agent ends the step.
    return ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--mpi=none", "--input=none", *agent]


class Supervision:
    """The agents' process and the signals that go on to it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start the agents and wait for them; a signal's number is added to 128."""
        direct = self.options.launcher == "direct"
        for number in SIGNALS:
            signal.signal(number, self._relay)
        # Signals wait until there is somebody to pass them on to, and in the agent until it has
        # handlers of its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        parent = os.getpid()
        self.child = subprocess.Popen(
            agent_command(self.options),
            preexec_fn=(lambda: die_with(parent)) if direct else _unblock,
        )
        _unblock()
        code = self.child.wait()
        return code if code >= 0 else 128 - code

    def _relay(self, number: int, frame: FrameType | None) -> None:
        """Slurm itself sends TERM to every task of a step; only the warning needs passing on
        there."""
        if self.child is not None and (
            number == signal.SIGUSR2 or self.options.launcher == "direct"
        ):
            self.child.send_signal(number)


def cancel_links_after_this(group: str) -> None:
    """The last act of a trial. Where scancel does not work here, each link finds out by itself."""
    try:
        make("slurm").cancel({group: env.ARRAY_JOB_ID.get()}, after=env.LINK.get())
    except EnvironmentFailure as error:
        logger.info("the links left over are not cancelled here: %s", error)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def main() -> int:
    options = parse()
    ownership.make_umask_private()
    log.configure(f"supervisor {options.group}")
    paths = RunPaths(options.run)
    reason = reason_to_leave(paths, options.submission)
    if reason is not None:
        logger.info("nothing to do: %s", reason)
        return 0
    logger.info("link %d, job %s", env.LINK.get(), env.JOB_ID.get())
    code = Supervision(options).run()
    if options.launcher == "srun" and reason_to_leave(paths, options.submission) is not None:
        cancel_links_after_this(options.group)
    return code


if __name__ == "__main__":
    sys.exit(main())
