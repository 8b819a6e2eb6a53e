"""Faults of a Slurm test bed's nodes, and other users' jobs on them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.beds import bed
from tests.support.trials import parent, wait_until

NO_USER_SIGNAL = ("--conf", "SlurmctldParameters=")
"""Options of a test bed whose batch processes get no signal of a preemption."""


def slurm(*command: str) -> str:
    """Run one of Slurm's commands on the bed of SLURM_CONF, and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.strip()


def queued(*options: str) -> list[str]:
    """Return the jobs that have not ended."""
    return slurm("squeue", "-h", "-o", "%i %T", *options).splitlines()


def wait_for_empty_queue() -> None:
    """Wait until all jobs have ended and all nodes are free. At the deadline, raise an error that
    names the remaining jobs and processes.
    """
    try:
        wait_until("an empty queue", lambda: not queued())
    except TimeoutError as error:
        left = (slurm("squeue"), slurm("sinfo", "-N", "-l"), _step_daemons())
        raise TimeoutError("\n".join([f"{error}:", *left])) from None


def _step_daemons() -> str:
    """Return Slurm's step daemons on this machine, and the kernel functions in which their threads
    wait.
    """
    shown = subprocess.run(
        ["ps", "-eLo", "pid,lwp,ppid,stat,wchan:24,etimes,args"],
        capture_output=True,
        text=True,
        check=True,
    )
    first, *lines = shown.stdout.splitlines()
    return "\n".join([first, *(line[:160] for line in lines if "slurmstepd:" in line)])


def preempt() -> None:
    """Submit a job of a higher tier that takes all nodes exclusively for a moment."""
    slurm("sbatch", "-p", "high", "-N4", "--exclusive", "-t1", "-o/dev/null", "--wrap", "sleep 1")


def node_of(pid: int) -> str:
    """Return Slurm's name of the node on which a process of a job was started."""
    for word in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
        if word.startswith("SLURMD_NODENAME="):
            return word.partition("=")[2]
    raise AssertionError(f"process {pid} is on no node")


def on_node(run: Path, name: str) -> Iterator[int]:
    """Return the processes of a run on a node."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, AssertionError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(run) in words and node_of(int(entry.name)) == name:
                    yield int(entry.name)


def kill_daemon(directory: Path, name: str) -> None:
    """Kill a node's slurmd. Its steps continue."""
    os.kill(int((directory / "pid" / f"slurmd.{name}.pid").read_text()), signal.SIGKILL)


def kill_node(directory: Path, run: Path, name: str, also: Sequence[int] = ()) -> None:
    """Kill all processes that a power failure ends: slurmd, its step daemons, and the run's
    processes on the node. ``also``: other processes.
    """
    pids = [*on_node(run, name), *also]
    daemons = {parent(Path(f"/proc/{pid}")) for pid in pids}
    kill_daemon(directory, name)
    victims = {pid for pid in daemons if is_step_daemon(pid)} | set(pids)
    # Stop all before killing the first, so that no process can report the death of another. Kill
    # children before their parents: the kernel continues stopped orphans, and a continued srun
    # cancels its step on the other hosts.
    deepest_first = sorted(victims, key=_depth, reverse=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in deepest_first:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _depth(pid: int) -> int:
    """Return the number of ancestors of a process."""
    above = parent(Path(f"/proc/{pid}"))
    return 1 + _depth(above) if above else 0


def is_step_daemon(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")
    return False


@contextmanager
def private_bed(*options: str, needs: tuple[str, ...] = ()) -> Iterator[Path]:
    """Start a bed that a test may break. ``options`` and ``needs``: as for `bed`."""
    with bed("--nodes", "4", "--gpus", "1", *options, needs=needs) as directory:
        yield directory
