"""A pool of judge processes, whose hangs and crashes do not affect the caller.

Every reward that needs processes uses it: math, code, and users' own rewards in ``reward.pool``.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from slurmrl.errors import UnreadableInputError, UsageError, WorkerDiedError
from slurmrl.rewards.judge import Judge, JudgeProgram, Verdict

ATTEMPTS = 2
"""Attempts for a request whose judge dies. A request that hangs is not retried."""
MOST_FAILED_STARTS = 3
MOST_JUDGES = 8
"""Largest default number of judges; each needs 50 to 100 MB."""
LOOK_S = 0.5
"""Between two looks whether a call is abandoned."""


class Unjudged(NamedTuple):
    """A request without a verdict."""

    why: str


class JudgePool:
    """Judges that are started on first use and replaced when they hang or die.

    :param timeout_s: for one request.
    :param processes: number of judges; None leaves it to each call.
    """

    def __init__(
        self, program: JudgeProgram, timeout_s: float, processes: int | None = None
    ) -> None:
        if not 0 < timeout_s < inf or (processes is not None and processes < 1):
            raise UsageError(f"timeout_s {timeout_s} and processes {processes} must be positive")
        self.facts: Verdict = {}
        """What the judge that started last has reported about itself."""
        self._size = processes
        self._timeout_s = timeout_s
        self._program = program
        self._judges: list[Judge] = []
        self._failed_starts = 0

    def judge(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        most: int = 1,
        within_s: float = inf,
        abandoned: Callable[[], bool] | None = None,
    ) -> list[Verdict | Unjudged]:
        """Return a verdict for each request; `Unjudged` where the judge took too long or kept
        dying, or the request was not done ``within_s`` after the first was sent, or when the call
        was ``abandoned``, which is looked at every `LOOK_S`. ``most`` is the number of judges if
        the constructor left it open.

        :raises EnvironmentFailure: the program cannot be executed.
        :raises WorkerDiedError: judges do not start.
        :raises UsageError: the program reports that the configuration is wrong.
        """
        self._drop_busy()  # with requests of a call that was interrupted
        batch = _Requests(requests, within_s)
        while batch.waiting or any(judge.request is not None for judge in self._judges):
            self._turn(batch, min(self._size or most, len(requests)), LOOK_S if abandoned else inf)
            if time.monotonic() > batch.end:
                batch.waiting.clear()
            if abandoned is not None and abandoned():
                self._drop_busy()
                break
        return batch.verdicts

    @property
    def pids(self) -> list[int]:
        return [judge.pid for judge in self._judges]

    def start(self) -> Verdict:
        """Start one judge, if there is none, and return `facts`. Raises as `judge` does."""
        while not any(judge.ready for judge in self._judges):
            self._turn(_Requests((), inf), 1)
        return self.facts

    def close(self) -> None:
        deadline = time.monotonic() + self._program.closing_s
        idle = [judge for judge in self._judges if judge.idle]
        for judge in idle:
            judge.end_input()
        for judge in self._judges:
            judge.close(deadline if judge in idle else 0.0)
        self._judges = []

    def _turn(self, batch: _Requests, size: int, most_s: float = inf) -> None:
        """Hand out requests to ``size`` judges and wait until something happens, at most for
        ``most_s``."""
        while len(self._judges) < size:
            self._judges.append(Judge(self._program))
        self._hand_out(batch)
        self._wait(most_s)
        for judge in list(self._judges):
            self._work(judge, batch)
        for judge in [each for each in self._judges if time.monotonic() > each.deadline]:
            batch.unjudged(judge.request, self._late(batch))
            self._drop(judge)

    def _hand_out(self, batch: _Requests) -> None:
        for judge in [judge for judge in self._judges if judge.idle]:
            if not batch.waiting:
                return
            now = time.monotonic()
            batch.begin(now)
            index = batch.waiting.popleft()
            judge.ask(index, batch.requests[index], min(self._timeout_s, batch.end - now))

    def _wait(self, most_s: float) -> None:
        """Wait until a judge has something to do, or until the first deadline."""
        busy = [judge for judge in self._judges if not judge.idle]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for judge in busy:
                for descriptor, events in judge.events():
                    selector.register(descriptor, events)
            left_s = min(judge.deadline for judge in busy) - time.monotonic()
            selector.select(min(max(left_s, 0.0), most_s))

    def _work(self, judge: Judge, batch: _Requests) -> None:
        try:
            message = judge.work()
        except WorkerDiedError as error:
            batch.retry(judge.request, str(error))
            self._drop(judge)
            return
        if message is None:
            return
        judge.deadline = inf
        if not judge.ready:
            self._started(judge, message)
        elif judge.request is not None:
            batch.verdicts[judge.request] = message
            judge.request = None
        if message.get("retire"):
            self._drop(judge)

    def _started(self, judge: Judge, message: Verdict) -> None:
        if "failed" in message:
            self.close()
            kind = UnreadableInputError if message.get("unreadable") else UsageError
            raise kind(str(message["failed"]))
        judge.ready = True
        self.facts = message
        self._failed_starts = 0

    def _drop_busy(self) -> None:
        for judge in [judge for judge in self._judges if judge.request is not None]:
            self._drop(judge)

    def _drop(self, judge: Judge) -> None:
        judge.close()
        self._judges.remove(judge)
        if not judge.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                self._failed_starts = 0
                self.close()
                raise WorkerDiedError(
                    f"{self._program.name} failed to start three times in a row"
                    f"{self._program.hint}; its messages are in the worker's log"
                )

    def _late(self, batch: _Requests) -> str:
        if time.monotonic() > batch.end:
            return batch.too_late
        return f"it took longer than {self._timeout_s:g} s"


class _Requests:
    """The requests of one call and their verdicts."""

    def __init__(self, requests: Sequence[Mapping[str, Any]], within_s: float) -> None:
        self.requests = requests
        self.waiting = deque(range(len(requests)))
        self.too_late = f"it was not judged within {within_s:g} s"
        self.verdicts: list[Verdict | Unjudged] = [Unjudged(self.too_late)] * len(requests)
        self.end = inf
        """Deadline for all requests."""
        self._attempts = [0] * len(requests)
        self._within_s = within_s

    def begin(self, now: float) -> None:
        self.end = min(self.end, now + self._within_s)

    def retry(self, index: int | None, why: str) -> None:
        """The judge of a request is lost; the request waits for another one, unless that was its
        last attempt."""
        if index is None:
            return
        self._attempts[index] += 1
        self.unjudged(index, why)
        if self._attempts[index] < ATTEMPTS:
            self.waiting.appendleft(index)

    def unjudged(self, index: int | None, why: str) -> None:
        if index is not None:
            self.verdicts[index] = Unjudged(why)
