"""The watchers of a job with spares: steps on its other hosts that outlive the batch host."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace

from slurmrl import env, log
from slurmrl.scheduler.client import SRUN
from slurmrl.workers.supervisor.job_hosts import JobHosts
from slurmrl.workers.supervisor.tasks_inside import unblock
from slurmrl.workers.supervisor.watcher import END

logger = log.get(__name__)

MOST = 3
"""This many hosts have a watcher, however many there are."""
END_S = 5.0
"""How long they may take to end. Slurm ends what is left of them with the job."""


class Watchers:
    """The watchers that this supervisor has started."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._steps: list[subprocess.Popen[bytes]] = []

    def start(self, job: JobHosts) -> None:
        """Start a step on each of the job's last hosts, if it has spares. It shares its host with
        whatever runs there in a round."""
        batch = env.NODE_NAME.get()
        others = [host for host in job.hosts if host != batch]
        if len(job.hosts) == job.needed or batch not in job.hosts:
            return  # without spares Slurm ends the job; a watcher must know its batch host
        for host in others[-MOST:]:
            logger.info("a watcher of %s starts on %s", batch, host)
            try:
                step = subprocess.Popen(self._command(host, batch), preexec_fn=unblock)
            except OSError as error:  # the rounds say so, too
                logger.warning("there are no watchers: %s", error)
                return
            self._steps.append(step)

    def end(self) -> None:
        """End those that still run."""
        for step in self._steps:
            if step.poll() is None:
                step.send_signal(END)
        deadline = time.monotonic() + END_S
        for step in self._steps:
            try:
                step.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                logger.info("the watcher of process %d ends with the job", step.pid)

    def _command(self, host: str, batch: str) -> list[str]:
        options = self._options
        place = [f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
        watcher = [sys.executable, "-P", "-m", "slurmrl.workers.supervisor.watcher"]
        watcher += ["--run", str(options.run), "--submission", str(options.submission)]
        return [*SRUN, *place, *watcher, "--group", options.group, "--host", batch]
