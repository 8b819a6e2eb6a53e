"""Calls of Slurm's commands. No other module starts one of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import environment, parse

TIMEOUT_S = 120.0
"""How long one command may take; Slurm's own message time-out is 10 s and it retries."""

FORGOTTEN = "Invalid job id specified"
"""What Slurm says about a single job that it no longer knows."""


class SlurmClient:
    """One method per command; each raises SchedulerError with the command and its words."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def ping(self) -> None:
        """Raise unless a controller answers."""
        self._run("scontrol", "ping")

    def hosts(self, partition: str | None) -> list[parse.HostRow]:
        """Hosts of the partitions (None: of all), whatever state they are in."""
        where = [f"--partition={partition}"] if partition else []
        form = f"--format={parse.HOSTS_FORMAT}"
        return parse.cluster_hosts(self._run("sinfo", "--noheader", "--Node", form, *where))

    def submit(self, script: Path) -> str:
        """Submit a script; returns the job id."""
        environ = environment.of_job(os.environ)
        return parse.job_id(self._run("sbatch", "--parsable", str(script), environ=environ))

    def queue(self, jobs: Iterable[str]) -> list[parse.QueueRow]:
        """Rows of these jobs, ended ones included as long as Slurm remembers them."""
        try:
            return self._queue(f"--jobs={','.join(jobs)}")
        except SchedulerError as error:
            if FORGOTTEN in str(error):
                return []
            raise

    def queue_by_name(self, names: Iterable[str]) -> list[parse.QueueRow]:
        return self._queue(f"--name={','.join(names)}")

    def cancel(self, elements: Iterable[str]) -> None:
        """Cancel jobs or ranges of elements (``41_[2-7]``); ended ones are no error."""
        self._run("scancel", "--quiet", *elements)

    def signal(self, name: str, elements: Iterable[str], *, steps: bool) -> None:
        """Send a signal to the batch processes only, or to those of the steps as well."""
        whom = "--full" if steps else "--batch"
        self._run("scancel", "--quiet", whom, f"--signal={name}", *elements)

    def _queue(self, selection: str) -> list[parse.QueueRow]:
        form = f"--format={parse.QUEUE_FORMAT}"
        return parse.queue(self._run("squeue", "--noheader", "--states=all", form, selection))

    def _run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                command,
                env=environ or environment.of_command(os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise SchedulerError(f"{command[0]} is not on PATH: is Slurm installed?") from error
        except subprocess.TimeoutExpired as error:
            raise SchedulerError(
                f"{command[0]} did not answer within {self._timeout_s:.0f} s"
            ) from error
        if done.returncode != 0:
            words = (done.stderr.strip() or done.stdout.strip()) or "no message"
            raise SchedulerError(f"{' '.join(command)} failed ({done.returncode}): {words}")
        return done.stdout
