"""The watchers of a job with spares: job steps that requeue the job if its batch host is lost.

``python -m slurmrl.workers.supervisor.watcher --run RUN --submission N --group G --host HOST`` runs
on other hosts of the job. The watcher requeues the job when Slurm has taken away HOST, on which the
batch process runs. A job with spares needs watchers (see `workers.link`). Agents notice the loss
sooner, but there may be no agent left to notice it, for example if the trainers run on one host.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from slurmrl import env, log
from slurmrl.backoff import Interval, retry
from slurmrl.config.load import load_resolved
from slurmrl.errors import SchedulerError
from slurmrl.fsio import calls
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.events import EventWriter
from slurmrl.run.lease import GAPS_PER_TTL
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.chain import TIMEOUT_S, Link
from slurmrl.scheduler.client import SRUN, SlurmClient
from slurmrl.workers.link import FirstAgent, requeue, this_start
from slurmrl.workers.supervisor.rounds import JobHosts
from slurmrl.workers.supervisor.tasks_inside import unblock

logger = log.get(__name__)

END = signal.SIGUSR2
"""Signal that the supervisor sends at the end of the job; srun forwards it silently."""
ASK_S = 30.0
"""Interval between two queries of Slurm while no agent is known to be alive."""
MOST = 3
"""Maximum number of hosts with a watcher."""
END_S = 5.0
"""Seconds that watchers may take to exit. Slurm ends remaining watchers with the job."""


class Watcher:
    """Watches the batch host of a job."""

    def __init__(
        self,
        link: Link,
        names: NameStore,
        host: str,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``host`` is the batch host, ``ttl_s`` the TTL of the agents' leases."""
        self._link, self._host = link, host
        self._ttl_s = ttl_s
        self._here = env.NODE_NAME.get()
        self._start = f"{env.JOB_ID.get()}.{link.restart}"
        self._client = SlurmClient(TIMEOUT_S)
        self._asks = Interval(ASK_S, clock)
        self._first = FirstAgent(link.run, names, ttl_s, clock)

    def watch(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Watch until the job was requeued or has ended."""
        while True:
            if not self._is_busy() and self._asks.due():
                lost = self._is_lost()
                if lost is None:
                    logger.info("nothing to watch: this job has ended or was requeued")
                    return
                if lost:
                    self._tell()
                    requeue(self._link, sleep)
            sleep(self._ttl_s / GAPS_PER_TTL / 2)

    def _is_busy(self) -> bool:
        """Return whether the first agent of the newest round is alive.

        Such an agent continues the trial even without a batch process, so Slurm is not queried.
        """
        known = self._first.claim
        if known is not None and self._first.observe().alive:
            return True
        return self._first.try_to_find(self._start) not in (None, known)

    def _is_lost(self) -> bool | None:
        """Return whether the job still has this host but has lost its batch host.

        Return None if the job has ended or was requeued.
        """
        try:
            row = this_start(self._client, self._link)
        except SchedulerError as error:
            logger.info("cannot ask Slurm for the hosts of this job, will retry: %s", error)
            return False
        if row is None:
            return None
        left = self._here in row.hosts and self._host not in row.hosts
        return row.raw == "RUNNING" and left

    def _tell(self) -> None:
        logger.warning("the batch host %s is lost: requeueing the job", self._host)
        writer = EventWriter(self._link.run, f"watcher.{self._start}.{self._here}")
        writer.write("batch_host_lost", host=self._host, job=self._start)


class Watchers:
    """The watchers that this supervisor has started."""

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._steps: list[subprocess.Popen[bytes]] = []

    def start(self, job: JobHosts) -> None:
        """Start a step on each of the job's last hosts, if it has spares.

        These steps share their hosts with the processes of a round.
        """
        batch = env.NODE_NAME.get()
        others = [host for host in job.hosts if host != batch]
        if len(job.hosts) == job.needed or batch not in job.hosts:
            return  # Without spares, Slurm ends the job if a host fails.
        for host in others[-MOST:]:
            logger.info("a watcher of %s starts on %s", batch, host)
            try:
                step = subprocess.Popen(self._command(host, batch), preexec_fn=unblock)
            except OSError as error:  # The rounds also fail and report the error.
                logger.warning("cannot start watchers of the batch host: %s", error)
                return
            self._steps.append(step)

    def end(self) -> None:
        """End the watchers that still run."""
        for step in self._steps:
            if step.poll() is None:
                step.send_signal(END)
        deadline = time.monotonic() + END_S
        for step in self._steps:
            try:
                step.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                logger.info("a watcher (pid %d) still runs; Slurm ends it with the job", step.pid)

    def _command(self, host: str, batch: str) -> list[str]:
        options = self._options
        place = [f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
        watcher = [sys.executable, "-P", "-m", "slurmrl.workers.supervisor.watcher"]
        watcher += ["--run", str(options.run), "--submission", str(options.submission)]
        return [*SRUN, *place, *watcher, "--group", options.group, "--host", batch]


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.supervisor.watcher")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    signal.signal(END, lambda *_: sys.exit(0))
    calls.set_private_umask()
    log.configure(f"watcher on {env.NODE_NAME.get()}")
    paths = RunPaths(options.run)
    link = Link.here(paths, options.submission, options.group)
    config = retry("read the configuration", lambda: load_resolved(paths.config))
    names = NameStore(paths.names)
    Watcher(link, names, options.host, config.cluster.lease_ttl_s).watch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
