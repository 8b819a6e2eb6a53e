"""Detection of failed incarnations from the events of a host's processes.

It also detects whether the kernel killed one of them for lack of memory.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slurmrl.run.reports import Cause, Failure
from slurmrl.tensors.parallel.gpu import GpuFault, find_in
from slurmrl.workers.agent.children import MASTER, Children, Ended, News
from slurmrl.workers.failure import failed

ECHO_GRACE_S = 2.0
"""How long to hold back an exception that looks like a consequence of another rank's end: that end
is the better explanation if it is reported in time."""
ECHO_TURN_S = 0.1
WATCHDOG = "watchdog thread terminated with exception"
"""What torch's NCCL watchdog prints, with the reason, before it aborts the process."""
OWN_CGROUPS = Path("/proc/self/cgroup")
COUNTER = "oom_kill"


class Symptoms:
    """Raises RunFailedError, with the failure in it, for the first failure."""

    def __init__(
        self,
        host: str,
        children: Children,
        oom: OomKills,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
        output: Callable[[], str] = str,
    ) -> None:
        """``output`` returns the newest output of the processes in this incarnation."""
        self.told_to_exit = False
        """Whether ``exit`` was passed on, so that workers may end."""
        self._host = host
        self._children = children
        self._oom = oom
        self._silence_s = silence_s
        self._output = output
        self._clock = clock
        self._echo: Failure | None = None
        self._echo_until = math.inf

    @property
    def longest_turn_s(self) -> float:
        """Return how long the next turn may wait."""
        return math.inf if self._echo is None else ECHO_TURN_S

    def judge(self, news: News) -> None:
        for failure in news.failures:
            if not failure.echo:
                raise failed(replace(failure, host=self._host))
            if self._echo is None:
                self._echo, self._echo_until = failure, self._clock() + ECHO_GRACE_S
        for ended in news.ended:
            self._judge_end(ended)
        silent = self._children.silent()
        if silent and not self.told_to_exit:  # a process that exits sends no pulse
            raise failed(self._of_silence(silent[0]))
        if self._echo is not None and self._clock() >= self._echo_until:
            raise failed(replace(self._echo, host=self._host))

    def _judge_end(self, ended: Ended) -> None:
        is_master = ended.name == MASTER
        early = not is_master and not self.told_to_exit
        if ended.code == 0 and not early:
            return
        if ended.rank is None and not is_master and ended.code > 0 and not ended.why:
            ended = replace(ended, why=self._last_words())
        reason = str(ended) if ended.code else f"{ended.name} exited unexpectedly"
        cause = Cause.MASTER if is_master else Cause.DIED
        if ended.code == -signal.SIGKILL and self._oom.happened():
            cause, reason = Cause.OOM, f"{reason} (the kernel's OOM killer)"
        certain = False
        if ended.code == -signal.SIGABRT and (fault := self._fault_that_aborted()):
            cause, reason = Cause.GPU_FAULT, f"{reason}: its GPU failed: {fault.words}"
            certain = fault.certain
        raise failed(
            Failure(
                cause=cause,
                reason=reason,
                host=self._host,
                world=self._children.world,
                rank=ended.rank,
                exit_code=ended.code,
                certain=certain,
            )
        )

    def _last_words(self) -> str:
        """Return the last line of the group's log, which may be another process's; "" without."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return f"the log ends with: {lines[-1]}" if lines else ""

    def _fault_that_aborted(self) -> GpuFault | None:
        """Return the GPU fault for which torch's NCCL watchdog ended a process.

        The watchdog looks at the GPU every 100 ms, and may be faster than the rank itself.
        """
        lines = self._output().splitlines()
        faults = (find_in(line) for line in lines if WATCHDOG in line)
        return next((fault for fault in faults if fault is not None), None)

    def _of_silence(self, rank: int | None) -> Failure:
        name = self._children.name(rank)
        return Failure(
            cause=Cause.HUNG,
            reason=f"{name} gave no sign of life for {self._silence_s:g} s and was killed",
            host=self._host,
            world=self._children.world,
            rank=rank,
            silent_s=self._silence_s,
        )


class OomKills:
    """Reads the kernel's count of out-of-memory kills from this machine's most precise counter.

    The counter is that of our control group (version 2, else 1), else that of the whole host. Our
    children are in that group or below it, even in containers.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = next((path for path in _counters(root) if _count(path) is not None), None)
        self._seen = self._count()

    def happened(self) -> bool:
        """Return whether there was one since the last call, or since the start."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        return (_count(self._path) if self._path is not None else None) or 0


def _counters(root: Path) -> list[Path]:
    """Return the files that may hold the count, the most precise one first."""
    counters: list[Path] = []
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / OWN_CGROUPS.relative_to("/")).splitlines():
        _, controllers, group = line.split(":", 2)
        own = group.lstrip("/")
        if not controllers:
            folders = (mounted, mounted / "unified")
            counters += [folder / own / "memory.events" for folder in folders]
        elif "memory" in controllers.split(","):
            counters.append(mounted / "memory" / own / "memory.oom_control")
    return [*counters, root / "proc/vmstat"]


def _count(path: Path) -> int | None:
    """Return the number in the counter's line, or None if there is no such line."""
    fields = [line.split() for line in _read(path).splitlines()]
    counts = [words[1] for words in fields if len(words) == 2 and words[0] == COUNTER]
    return int(counts[0]) if counts and counts[0].isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
