"""Collection of the stacks of a host's processes, with the state of those that do not answer."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmrl import log
from slurmrl.workers import stacks
from slurmrl.workers.agent.children import Children

logger = log.get(__name__)

ANSWER_S = 5.0
"""How long a process may take to answer. A running one takes milliseconds."""
RUNNING_S = 1.0
"""How long a process may take, after its stacks, to add what needs the interpreter."""
PAUSE_S = 0.05
MOST_BYTES = 256 * 1024
"""Longest text of one process."""
PY_SPY = "py-spy"
PY_SPY_S = 5.0
MOST_PY_SPY = 4
"""Processes on which py-spy is tried, one after another: each may take `PY_SPY_S`."""
STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger holds it",
    "D": "it is blocked in the kernel (a file system or a device does not answer)",
    "Z": "it has ended",
}
MAIN_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*?\(most recent call first\):\n", re.M)
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.M)


@dataclass(frozen=True)
class StacksAnswer:
    rank: int | None
    """None for the master."""
    name: str
    text: str
    """Its stacks, or why there are none."""
    answered: bool


def collect(
    children: Children, ranks: Sequence[int | None], pause: Callable[[float], None]
) -> list[StacksAnswer]:
    """Return the stacks of these processes, within `ANSWER_S` plus the time of py-spy. ``pause``
    waits."""
    for rank in ranks:
        stacks.clear(children.stacks_fd(rank))
        children.ask_stacks(rank)
    began = time.monotonic()
    wrote_at: dict[int | None, float] = {}
    waiting = list(ranks)
    while waiting and (passed_s := time.monotonic() - began) < ANSWER_S:
        pause(PAUSE_S)
        for rank in tuple(waiting):
            text, complete = stacks.take(children.stacks_fd(rank), MOST_BYTES)
            if text:
                wrote_at.setdefault(rank, passed_s)
            if complete or passed_s - wrote_at.get(rank, passed_s) > RUNNING_S:
                waiting.remove(rank)
    return list(_answers(children, ranks))


def _answers(children: Children, ranks: Sequence[int | None]) -> Iterator[StacksAnswer]:
    py_spy_left = MOST_PY_SPY
    for rank in ranks:
        name = children.name(rank)
        text, complete = stacks.take(children.stacks_fd(rank), MOST_BYTES)
        stacks.clear(children.stacks_fd(rank))
        if text and not complete:
            text += "(no Python code ran: something holds the interpreter lock)\n"
        if text:
            yield StacksAnswer(rank, name, text, True)
            continue
        pid = children.find_pid(rank)
        why = f"{name} did not answer" + (f": {_state(pid)}" if pid is not None else "")
        py_spy_left -= 1
        seen = _py_spy(pid) if pid is not None and py_spy_left >= 0 else ""
        yield StacksAnswer(rank, name, f"({why})\n{seen}", False)


def _state(pid: int) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return STATES["Z"]
    return STATES.get(state, f"it is in state {state}")


def _py_spy(pid: int) -> str:
    """Return what py-spy reads from outside, even of a stopped process, or why it could not."""
    program = shutil.which(PY_SPY)
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PY_SPY_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({PY_SPY}: {error})\n"
    output = (done.stdout or done.stderr).decode(errors="replace")[:MOST_BYTES]
    return f"Seen by {PY_SPY}:\n{output}"


def top_frame(text: str) -> str:
    """Return where the main thread (the last one listed) is: ``rewards.py:44 in __call__``."""
    parts = MAIN_THREAD.split(text)
    found = FRAME.search(parts[-1]) if len(parts) > 1 else None
    if found is None:
        return ""
    return f"{Path(found['file']).name}:{found['line']} in {found['name']}"
