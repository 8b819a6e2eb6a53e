"""A pool of judge processes, whose hangs and crashes do not affect the caller."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from slurmrl.errors import UsageError, WorkerDiedError

PROGRAM = Path(__file__).with_name("math_judge.py")
Verdict = dict[str, Any]
"""A judge's reply."""

START_LIMIT_S = 120.0
ATTEMPTS = 2
"""Attempts for a request whose judge dies. A request that hangs is not retried."""


class Judge:
    """One process, which handles one request at a time."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._buffer = b""
        self.ready = False
        self.request: int | None = None
        """Index of the request in progress."""
        self.deadline = time.monotonic() + START_LIMIT_S

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self.request is None

    def fileno(self) -> int:
        return self._replies.fileno()

    def ask(self, index: int, request: Mapping[str, Any], timeout_s: float) -> None:
        """Send a request. Raises BrokenPipeError if the process is dead."""
        self.request = index
        self.deadline = time.monotonic() + timeout_s
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()

    def receive(self) -> dict[str, Any] | None:
        """Read from the readable pipe. Return the message, or None while its line is incomplete.
        Raises EOFError if the process is dead."""
        data = os.read(self.fileno(), 65536)
        if not data:
            raise EOFError
        self._buffer += data
        if not self._buffer.endswith(b"\n"):
            return None
        line, self._buffer = self._buffer, b""
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Kill the process and reap it."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
        try:
            self._requests.close()
        except BrokenPipeError:
            return


class JudgePool:
    """Judges that are started on first use and replaced when they hang or die.

    :param timeout_s: for one request.
    :param processes: number of judges; None leaves it to each call.
    """

    def __init__(
        self,
        timeout_s: float,
        processes: int | None = None,
        program: Path = PROGRAM,
    ) -> None:
        if timeout_s <= 0 or (processes is not None and processes < 1):
            raise UsageError(f"timeout_s {timeout_s} and processes {processes} must be positive")
        self._size = processes
        self._timeout_s = timeout_s
        self._program = program
        self._judges: list[Judge] = []
        self._failed_starts = 0
        self._end = inf
        """Deadline for all requests of the current call."""

    def judge(
        self, requests: Sequence[Mapping[str, Any]], *, most: int = 1, within_s: float = inf
    ) -> list[Verdict | None]:
        """Return a verdict for each request; None where the judge took too long or kept dying, or
        the request was not done ``within_s`` after the first was sent. ``most`` is the number of
        judges if the constructor left it open.

        :raises WorkerDiedError: judges do not start.
        """
        verdicts: list[Verdict | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        attempts = [0] * len(requests)
        self._end = inf
        while waiting or any(judge.request is not None for judge in self._judges):
            self._fill(min(self._size or most, len(requests)))
            self._hand_out(requests, waiting, attempts, within_s)
            for judge in self._readable():
                self._receive(judge, verdicts, waiting, attempts)
            for judge in [j for j in self._judges if time.monotonic() > j.deadline]:
                self._drop(judge)
            if time.monotonic() > self._end:
                waiting.clear()
        return verdicts

    @property
    def pids(self) -> list[int]:
        return [judge.pid for judge in self._judges]

    def close(self) -> None:
        for judge in self._judges:
            judge.close()
        self._judges = []

    def _fill(self, size: int) -> None:
        while len(self._judges) < size:
            self._judges.append(Judge(self._program))

    def _hand_out(
        self,
        requests: Sequence[Mapping[str, Any]],
        waiting: deque[int],
        attempts: list[int],
        within_s: float,
    ) -> None:
        for judge in [judge for judge in self._judges if judge.idle]:
            if not waiting:
                return
            index = waiting.popleft()
            now = time.monotonic()
            self._end = min(self._end, now + within_s)
            try:
                judge.ask(index, requests[index], min(self._timeout_s, self._end - now))
            except BrokenPipeError:
                self._lost(judge, waiting, attempts)

    def _readable(self) -> list[Judge]:
        """Wait for judges with something to read; none when the first deadline passes."""
        busy = [judge for judge in self._judges if not judge.idle]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for judge in busy:
                selector.register(judge, selectors.EVENT_READ)
            left_s = min(judge.deadline for judge in busy) - time.monotonic()
            return [key.fileobj for key, _ in selector.select(max(left_s, 0.0))]  # type: ignore[misc]

    def _receive(
        self,
        judge: Judge,
        verdicts: list[Verdict | None],
        waiting: deque[int],
        attempts: list[int],
    ) -> None:
        try:
            message = judge.receive()
        except EOFError:
            self._lost(judge, waiting, attempts)
            return
        if message is None:
            return
        judge.deadline = inf
        if judge.request is None:
            judge.ready = True
            self._failed_starts = 0
        else:
            verdicts[judge.request] = message
            judge.request = None

    def _lost(self, judge: Judge, waiting: deque[int], attempts: list[int]) -> None:
        """Replace a judge that died, and retry its request unless that was its last attempt."""
        if judge.request is not None:
            attempts[judge.request] += 1
            if attempts[judge.request] < ATTEMPTS:
                waiting.appendleft(judge.request)
        self._drop(judge)

    def _drop(self, judge: Judge) -> None:
        judge.close()
        self._judges.remove(judge)
        if not judge.ready:
            self._failed_starts += 1
            if self._failed_starts >= 3:
                raise WorkerDiedError(
                    f"{self._program.name} failed to start three times in a row; is math-verify "
                    "installed? Its messages are in the worker's log"
                )
