"""Calls of Slurm's commands. No other module runs Slurm's commands."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slurmrl import log
from slurmrl.errors import SchedulerError
from slurmrl.scheduler import base, parse, states

logger = log.get(__name__)

TIMEOUT_S = 120.0
"""Time limit of one command, in seconds. Slurm itself retries a message after 10 s."""

FORGOTTEN = "Invalid job id specified"
"""Slurm's message for a single job that it no longer knows."""

TRANSIENT = re.compile(
    "Socket timed out|Unable to contact slurm controller|did not answer|Zero Bytes were transmitted"
    r"|Unexpected message received|(Message|Communication) \w+ failure|failed \((-\d+|1[3-6]\d)\):"
)
"""Errors after which Slurm may have queued the job: no or a lost answer, or a killed sbatch."""

NO_WORDS = "no message"
"""Words in the error for a command that printed no message."""

NO_ACCOUNTING = ("accounting storage is disabled", "is not on PATH")
"""Parts of messages that mean that Slurm has no accounting, or that sacct is missing."""

NO_TEST = "--test-only"
"""Part of the message of an sbatch that lacks the option ``--test-only``."""
NAMED = {
    "constraint": (("sinfo", "--noheader", "--format=Features=%f"), "Features"),
    "nodelist": (("sinfo", "--noheader", "--Node", "--format=Hosts=%N"), "Hosts"),
    "reservation": (("scontrol", "--oneliner", "show", "reservation"), "ReservationName"),
    "licenses": (("scontrol", "--oneliner", "show", "licenses"), "LicenseName"),
}
"""Command that lists the possible values of an sbatch option, and the field with the values."""
_WORDS = re.compile(r" failed \(-?\d+\): (.*)", re.DOTALL)

DEAD_STATES = ("down", "fail", "unknown", "powered_down", "powering_down")
"""Prefixes of sinfo states of hosts on which nothing can be started."""

OUT_OF_SERVICE = (*DEAD_STATES, "drain", "maint", "reserved", "reboot", "boot", "power", "inval")
"""Prefixes of sinfo states of hosts on which no new job starts now."""


def may_have_worked(error: SchedulerError) -> bool:
    """Return whether sbatch may have submitted the job although it failed with this error."""
    return TRANSIENT.search(str(error)) is not None


SRUN = ("srun", "--export=ALL", "--mpi=none", "--input=none", "--cpu-bind=none")
"""Command that starts one task on each host of a job. The task gets the environment after the
set-up lines (--export=ALL) and all CPUs of the job. (Slurm's default is one CPU.)"""


class SlurmClient:
    """Slurm's commands. Each method raises SchedulerError with the command and its message."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def ping(self) -> None:
        """Raise an error unless a controller answers."""
        self._run("scontrol", "ping")

    def version(self) -> str:
        """Return Slurm's version, such as ``22.05.8``."""
        return parse.version(self._run("sbatch", "--version"))

    def try_out(self, script: Path, *options: str) -> None:
        """Raise an error unless sbatch would accept the script. Submit nothing."""
        command = ("sbatch", "--test-only", *options, str(script))
        self._run(*command, environ=base.job_environment(os.environ))

    def expected_start(self, script: Path) -> datetime:
        """Return the time (UTC) at which a job with the script would start. Submit nothing."""
        command = ("sbatch", "--test-only", str(script))
        done = self._completed(*command, environ=base.job_environment(os.environ) | {"TZ": "UTC0"})
        return parse.expected_start(f"{done.stderr}\n{done.stdout}")

    def rejection(self, script: Path) -> str | None:
        """Return Slurm's message if sbatch would reject a script. Submit nothing.

        Return None if sbatch would accept the script or has no ``--test-only``. Raises
        SchedulerError if Slurm does not answer.
        """
        try:
            self.try_out(script)
        except SchedulerError as error:
            words = _WORDS.search(str(error))
            if words is None or may_have_worked(error):
                raise
            return None if NO_TEST in words[1] else " ".join(parse.messages(words[1]))
        return None

    def hosts(self, partition: str | None, names: Sequence[str] = ()) -> list[parse.HostRow]:
        """Return a partition's hosts (None: all) with these names (empty: all), in any state."""
        where = [f"--partition={partition}"] if partition else []
        where += [f"--nodes={','.join(names)}"] if names else []
        form = f"--format={parse.HOSTS_FORMAT}"
        return parse.cluster_hosts(self._run("sinfo", "--noheader", "--Node", form, *where))

    def partitions(self) -> list[parse.Partition]:
        """Return the partitions that this user can see."""
        form = f"--format={parse.PARTITIONS_FORMAT}"
        return parse.partitions(self._run("sinfo", "--noheader", form))

    def accounts(self, user: str) -> parse.Accounts:
        """Return the accounts that a user may charge."""
        form = f"format={parse.ACCOUNTS_FORMAT}"
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "user", user, "withassoc", form)
        return parse.accounts(self._run(*command))

    def qos_limits(self) -> dict[str, str]:
        """Return the time limit of each QOS; an empty string means no limit."""
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,MaxWall")
        return parse.qos_limits(self._run(*command))

    def names(self, option: str, user: str) -> list[str] | None:
        """Return the values that the cluster has for an option of sbatch, such as ``constraint``.

        Only the accounts depend on ``user``. Return None for an option whose values no command
        lists.
        """
        if option == "account":
            return list(self.accounts(user).names)
        if option == "qos":
            return sorted(self.qos_limits())
        if option == "partition":
            return [one.name for one in self.partitions()]
        if option not in NAMED:
            return None
        command, field = NAMED[option]
        return parse.names(self._run(*command), field)

    def partition_names(self) -> list[str]:
        """Return the names of all partitions, including partitions that this user cannot see."""
        return parse.partition_names(self._run("sinfo", "--noheader", "--all", "--format=%R|%a"))

    def time_left_s(self, job: str) -> float | None:
        """Return the seconds until a running job reaches its time limit; None without a limit."""
        return parse.time_left_s(self._run("squeue", "--noheader", "--format=%L", f"--jobs={job}"))

    def submit(
        self, script: Path, *options: str, inherited: Mapping[str, str] | None = None
    ) -> str:
        """Submit a script and return the job id.

        Options override the script's directives. The job inherits ``inherited`` if given, else
        variables of this process. Log messages of the site's plugins: a plugin may have changed the
        partition or the time limit.
        """
        environ = base.job_environment(os.environ, inherited)
        command = ("sbatch", "--parsable", *options, str(script))
        done = self._completed(*command, environ=environ)
        for line in parse.messages(done.stderr):
            logger.warning("message of sbatch: %s", line)
        return parse.job_id(done.stdout)

    def queue(self, jobs: Iterable[str]) -> list[states.QueueRow]:
        """Return the rows of these jobs, including ended jobs that Slurm still remembers.

        One call of squeue covers all jobs. If squeue fails or is not Slurm's program, scontrol runs
        once per job.
        """
        wanted = tuple(jobs)
        try:
            return self._queue(f"--jobs={','.join(wanted)}")
        except SchedulerError as error:
            if FORGOTTEN in str(error):
                return []
            if may_have_worked(error):  # The controller is silent; scontrol would not help.
                raise
            with contextlib.suppress(SchedulerError):
                return [row for job in wanted for row in self._shown(job)]
            raise

    def row_of(self, element: str) -> states.QueueRow | None:
        """Return the current row of an element (``41_3``), or None if Slurm has forgotten it.

        Raises SchedulerError.
        """
        job, _, index = element.partition("_")
        return next((row for row in self.queue([job]) if int(index) in row.elements), None)

    def queue_by_name(self, names: Iterable[str]) -> list[states.QueueRow]:
        return self._queue(f"--name={','.join(names)}")

    def accounting(self, jobs: Iterable[str]) -> list[states.QueueRow] | None:
        """Return the rows of these jobs in the accounting database; None without a database."""
        form = (f"--format={states.ACCOUNTING_FORMAT}", f"--jobs={','.join(jobs)}")
        try:
            text = self._run("sacct", "--noheader", "--parsable2", "--allocations", *form)
        except SchedulerError as error:
            if any(words in str(error) for words in NO_ACCOUNTING):
                return None
            raise
        return states.accounting(text)

    def settings(self) -> dict[str, str]:
        """Return the cluster's configuration (``scontrol show config``)."""
        return parse.assignments(self._run("scontrol", "show", "config"))

    def submit_limits(self, user: str) -> str:
        """Return the limits and usage of a user's associations, as scontrol prints them."""
        return self._run("scontrol", "show", "assoc_mgr", f"users={user}", "flags=assoc")

    def requeue(self, element: str) -> None:
        """Requeue a running element (``41_3``). Slurm ends the element and starts it again."""
        self._run("scontrol", "requeue", element)

    def exclude(self, element: str, hosts: str) -> None:
        """Exclude exactly these hosts for queued elements (``41_[2-7]``)."""
        self._run("scontrol", "update", f"JobId={element}", f"ExcNodeList={hosts}")

    def throttle(self, job: str, count: int) -> None:
        """Set the number of elements of an array that may run at once."""
        self._run("scontrol", "update", f"JobId={job}", f"ArrayTaskThrottle={count}")

    def hold(self, elements: str) -> None:
        """Hold queued elements (``41_[2-7]``) with a user's hold.

        If an administrator ran ``scontrol hold``, Slurm would report an administrator's hold, as if
        the site had set the hold.
        """
        self._run("scontrol", "uhold", elements)

    def release(self, elements: str) -> None:
        """Release held elements, so that they can start."""
        self._run("scontrol", "release", elements)

    def cancel(self, elements: Iterable[str]) -> None:
        """Cancel jobs or ranges of elements (``41_[2-7]``). Ignore jobs that have ended."""
        self._scancel(*elements)

    def signal(self, name: str, elements: Iterable[str], *, steps: bool) -> None:
        """Send a signal to the batch processes and, with ``steps``, to the steps' processes."""
        whom = "--full" if steps else "--batch"
        self._scancel(whom, f"--signal={name}", *elements)

    def _scancel(self, *arguments: str) -> None:
        """Run scancel. Ignore a failure without a message: the job has just ended."""
        try:
            self._run("scancel", "--quiet", *arguments)
        except SchedulerError as error:
            if NO_WORDS not in str(error):
                raise

    def _shown(self, job: str) -> list[states.QueueRow]:
        try:
            return states.control(self._run("scontrol", "show", "job", "--oneliner", job))
        except SchedulerError as error:
            if FORGOTTEN in str(error):
                return []
            raise

    def _queue(self, selection: str) -> list[states.QueueRow]:
        form = f"--Format={states.QUEUE_FORMAT}"
        return states.queue(self._run("squeue", "--noheader", "--states=all", form, selection))

    def _run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        return self._completed(*command, environ=environ).stdout

    def _completed(
        self, *command: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(
                command,
                executable=shutil.which(command[0]),  # Ignore a job's PATH in `environ`.
                env=environ or base.command_environment(os.environ),
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
            words = (done.stderr.strip() or done.stdout.strip()) or NO_WORDS
            raise SchedulerError(f"{' '.join(command)} failed ({done.returncode}): {words}")
        return done


def usable_hosts(hosts: Iterable[str], lost: Iterable[str]) -> tuple[str, ...]:
    """Return the hosts without ``lost`` and, if Slurm answers, without dead hosts."""
    left = [host for host in hosts if host not in set(lost)]
    try:
        found = SlurmClient().hosts(None, left) if left else []
    except SchedulerError as error:
        logger.info("cannot query the states of hosts: %s", error)
        return tuple(left)
    dead = {row.name for row in found if is_dead(row.state)}
    return tuple(host for host in left if host not in dead)


def is_dead(state: str) -> bool:
    """Return whether a host is unusable. A trailing star in sinfo's state means no response."""
    return state.endswith("*") or state.startswith(DEAD_STATES)


def is_out_of_service(state: str) -> bool:
    """Return whether a host with this state in sinfo gets no new jobs now."""
    return is_dead(state) or state.startswith(OUT_OF_SERVICE)
