"""A pool of judge processes that may hang or die without harm to whoever asks."""

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
START_LIMIT_S = 120.0
ATTEMPTS = 2
"""Times that a request is tried when its judge dies; what hangs is not tried again."""


class Judge:
    """One process, which answers one request at a time."""

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
        """Index of the request that it works on."""
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
        """Raises BrokenPipeError when the process is dead."""
        self.request = index
        self.deadline = time.monotonic() + timeout_s
        self._requests.write(json.dumps(request).encode() + b"\n")
        self._requests.flush()

    def receive(self) -> dict[str, Any] | None:
        """What it says once its pipe is readable; None while the line is incomplete. Raises
        EOFError when the process is dead."""
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
    """``processes`` judges, started on first use and replaced when they hang or die."""

    def __init__(self, processes: int, timeout_s: float, program: Path = PROGRAM) -> None:
        if processes < 1 or timeout_s <= 0:
            raise UsageError(f"processes {processes} and timeout_s {timeout_s} must be positive")
        self._size = processes
        self._timeout_s = timeout_s
        self._program = program
        self._judges: list[Judge] = []
        self._failed_starts = 0

    def judge(self, requests: Sequence[Mapping[str, Any]]) -> list[bool | None]:
        """A verdict for each request; None where the judge took too long or kept dying.

        :raises WorkerDiedError: judges do not even start.
        """
        verdicts: list[bool | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        attempts = [0] * len(requests)
        while waiting or any(judge.request is not None for judge in self._judges):
            self._fill()
            self._hand_out(requests, waiting, attempts)
            for judge in self._readable():
                self._receive(judge, verdicts, waiting, attempts)
            for judge in [j for j in self._judges if time.monotonic() > j.deadline]:
                self._drop(judge)
        return verdicts

    @property
    def pids(self) -> list[int]:
        return [judge.pid for judge in self._judges]

    def close(self) -> None:
        for judge in self._judges:
            judge.close()
        self._judges = []

    def _fill(self) -> None:
        while len(self._judges) < self._size:
            self._judges.append(Judge(self._program))

    def _hand_out(
        self, requests: Sequence[Mapping[str, Any]], waiting: deque[int], attempts: list[int]
    ) -> None:
        for judge in [judge for judge in self._judges if judge.idle]:
            if not waiting:
                return
            index = waiting.popleft()
            try:
                judge.ask(index, requests[index], self._timeout_s)
            except BrokenPipeError:
                self._lost(judge, waiting, attempts)

    def _readable(self) -> list[Judge]:
        """Judges with something to read, or none when the first deadline has come."""
        busy = [judge for judge in self._judges if not judge.idle]
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for judge in busy:
                selector.register(judge, selectors.EVENT_READ)
            patience = min(judge.deadline for judge in busy) - time.monotonic()
            return [key.fileobj for key, _ in selector.select(max(patience, 0.0))]  # type: ignore[misc]

    def _receive(
        self,
        judge: Judge,
        verdicts: list[bool | None],
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
            verdicts[judge.request] = message["correct"]
            judge.request = None

    def _lost(self, judge: Judge, waiting: deque[int], attempts: list[int]) -> None:
        """A judge died: its request is tried again, unless it died of it before."""
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
                    f"{self._program.name} did not start three times in a row; is math-verify "
                    "installed? Its messages are in the worker's log"
                )
