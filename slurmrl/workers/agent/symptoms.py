"""Failure detection: which events of a host's processes mean that the incarnation has failed."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

from slurmrl.errors import RunFailedError
from slurmrl.parallel.gpu_faults import GpuFault, find_in
from slurmrl.workers import messages
from slurmrl.workers.agent.children import Children, News
from slurmrl.workers.agent.memory import OomKills
from slurmrl.workers.agent.slot import Ended
from slurmrl.workers.failure import Cause, Failure
from slurmrl.workers.messages import Message

ECHO_GRACE_S = 2.0
"""How long to hold back an exception that looks like a consequence of another rank's end: that end
is the better explanation if it is reported in time."""
ECHO_TURN_S = 0.1
WATCHDOG = "watchdog thread terminated with exception"
"""What torch's NCCL watchdog prints, with the reason, before it aborts the process."""


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
        self._echo: Message | None = None
        self._echo_until = math.inf

    @property
    def longest_turn_s(self) -> float:
        """Return how long the next turn may wait."""
        return math.inf if self._echo is None else ECHO_TURN_S

    def judge(self, news: News) -> None:
        errors = [message for message in news.received if message["type"] == messages.ERROR]
        for error in errors:
            if not error.get("echo"):
                raise _failed(self._of_error(error))
            if self._echo is None:
                self._echo, self._echo_until = error, self._clock() + ECHO_GRACE_S
        for ended in news.ended:
            self._judge_end(ended)
        silent = self._children.silent()
        if silent and not self.told_to_exit:  # a process that exits sends no pulse
            raise _failed(self._of_silence(silent[0]))
        if self._echo is not None and self._clock() >= self._echo_until:
            raise _failed(self._of_error(self._echo))

    def _judge_end(self, ended: Ended) -> None:
        early = ended.rank is not None and not self.told_to_exit
        if ended.code == 0 and not early:
            return
        reason = str(ended) if ended.code else f"{ended.name} exited unexpectedly"
        cause = Cause.MASTER if ended.rank is None else Cause.DIED
        if ended.code == -signal.SIGKILL and self._oom.happened():
            cause, reason = Cause.OOM, f"{reason} (the kernel's OOM killer)"
        if ended.code == -signal.SIGABRT and (fault := self._fault_that_aborted()):
            reason = f"{reason}: its GPU failed: {fault.words}"
            known = self._known(Cause.GPU_FAULT, reason, ended.rank)
            raise _failed({**known, "certain": fault.certain})
        raise _failed(self._known(cause, reason, ended.rank))

    def _fault_that_aborted(self) -> GpuFault | None:
        """Return the fault for which torch's NCCL watchdog ended a process: it looks at the GPU
        every 100 ms, and may be faster than the rank itself."""
        lines = self._output().splitlines()
        faults = (find_in(line) for line in lines if WATCHDOG in line)
        return next((fault for fault in faults if fault is not None), None)

    def _of_silence(self, rank: int | None) -> Failure:
        name = self._children.name(rank)
        text = f"{name} gave no sign of life for {self._silence_s:g} s and was killed"
        return self._known(Cause.HUNG, text, rank)

    def _of_error(self, error: Message) -> Failure:
        known = {key: value for key, value in error.items() if key not in ("type", "oom")}
        cause = Cause.OOM if error.get("oom") else Cause.EXCEPTION
        gpu = f"{error['gpu']} failed: " if "gpu" in error else ""
        reason = f"rank {error['rank']}: {gpu}{error['exception']}"
        return {**self._known(cause, reason, error["rank"]), **known}

    def _known(self, cause: Cause, reason: str, rank: int | None) -> Failure:
        known: Failure = {"cause": cause, "reason": reason, "host": self._host}
        return known if rank is None else {**known, "rank": rank}


def _failed(failure: Failure) -> RunFailedError:
    return RunFailedError(failure["reason"], failure)
