"""Rewards that fail in all ways of user code. The completion chooses the failure."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
PIPES = 10
"""More descriptors than a judge has open."""


def score(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows, *, folder: str = ""
) -> list[Any]:
    """Return the length of the only completion, unless it names a failure."""
    [completion] = completions
    match completion:
        case "raise":
            raise KeyError("nothing")
        case "exit":
            sys.exit(0)
        case "die":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "nan":
            return [float("nan")]
        case "text":
            return ["1"]
        case "several":
            return [1.0, 2.0]
        case "recursion":
            return score(prompts, completions, rows)
        case "memory":
            return [float(len(bytearray(8 << 30)))]
        case "print":
            print('{"score": 99}\n' * 10_000, flush=True)
        case "read":
            sys.stdin.read()
        case "close pipes":
            os.closerange(3, PIPES)
        case "fork":
            _leave_a_process(folder, session=False)
            os._exit(1)
        case "leave":
            _leave_a_process(folder)
        case "hang":
            _leave_a_process(folder)
            time.sleep(3600)
        case "split":
            os.fork()
    return [float(len(completion))]


def _leave_a_process(folder: str, *, session: bool = True) -> None:
    """Fork a process that keeps the pipes open, and start a program that ignores SIGTERM. If the
    reward's process stays alive, the program leads a session.
    """
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
    started = subprocess.Popen([sys.executable, "-c", program], start_new_session=session)
    forked = os.fork()
    if forked == 0:
        time.sleep(3600)
        os._exit(0)
    Path(folder, f"{os.getpid()}.pids").write_text(f"{started.pid} {forked}")


def once(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows, *, folder: str
) -> list[float]:
    """Kill the process at the first call."""
    path = Path(folder, "died")
    if not path.exists():
        path.touch()
        os._exit(9)
    return [1.0]


def bounded(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows, bound: float = 1.0
) -> list[float]:
    return [float(math.isinf(bound))] * len(completions)


async def asynchronous(
    prompts: Sequence[str], completions: Sequence[str], rows: Rows
) -> list[float]:
    return [2.0]


class Careful:
    """A reward class with resources, statistics and a check of rows."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], rows: Rows, *, step: int
    ) -> list[float]:
        return [float(step)]

    def stats(self) -> dict[str, tuple[float, float]]:
        return {"careful": (2.0, 1.0)}

    def check_rows(self, rows: Rows) -> list[str]:
        return ["" if "answer" in row else "it has no answer" for row in rows]

    def close(self) -> None:
        (self._folder / "closed").touch()


def unmakeable() -> None:
    raise AssertionError("not called")


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no license")

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], rows: Rows) -> list[int]:
        return []
