"""Collection of the stacks of a host's processes, and files and reports with these stacks.

If a process does not answer, the report contains the process's state.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurmrl import child, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.run import hang
from slurmrl.run.hang import RankProgress
from slurmrl.workers.agent.agent_host import Host
from slurmrl.workers.agent.children import Children
from slurmrl.workers.child_process import clear_stacks, own_stacks, take_stacks
from slurmrl.workers.messages import Stacked

logger = log.get(__name__)

ANSWER_S = 5.0
"""Seconds that a process may take to answer. A running process takes milliseconds."""
RUNNING_S = 1.0
"""Seconds from a process's stacks to the parts of its answer that need the interpreter."""
PAUSE_S = 0.05
MOST_BYTES = 256 * 1024
"""Maximum bytes of the stacks of one process."""
PY_SPY = "py-spy"
PY_SPY_S = 8.0
"""Total seconds that py-spy may take for all processes."""
HELD = "Tt"
"""States of stopped processes, which py-spy cannot pause to read their C frames."""
BLOCKED = "D"
STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    BLOCKED: "it is blocked in the kernel (a file system or a device does not answer)",
    "S": "it waits outside of Python, with signals blocked",
    "R": "it runs outside of Python, with signals blocked",
    "Z": "it has ended",
}
MAIN_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*?\(most recent call first\):\n", re.M)
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.M)
DENIED = "; kernel.yama.ptrace_scope or the container may forbid this"
SEEN = f"Seen by {PY_SPY}:\n"
SEEN_THREAD = re.compile(r"^Thread .*\n", re.M)
SEEN_FRAME = re.compile(r"^    (?P<name>.+) \((?P<file>.+\.py|<.+>):(?P<line>\d+)\)$", re.M)
MOST_FILES = 10
"""Maximum number of files that one agent keeps; a new file replaces the oldest file."""


@dataclass(frozen=True)
class StacksAnswer:
    rank: int | None
    """Rank of the process; None for the master."""
    name: str
    text: str
    """Stacks of the process, or the reason why there are none."""
    answered: bool


def collect(
    children: Children, ranks: Sequence[int | None], pause: Callable[[float], None]
) -> list[StacksAnswer]:
    """Return the stacks of processes, within `ANSWER_S` plus the time of py-spy.

    ``pause`` is the function that waits. Rank None means the master.
    """
    for rank in ranks:
        clear_stacks(children.stacks_fd(rank))
        children.ask_stacks(rank)
    began = time.monotonic()
    wrote_at: dict[int | None, float] = {}
    waiting = list(ranks)
    while waiting and (passed_s := time.monotonic() - began) < ANSWER_S:
        pause(PAUSE_S)
        for rank in tuple(waiting):
            text, complete = take_stacks(children.stacks_fd(rank), MOST_BYTES)
            if text:
                wrote_at.setdefault(rank, passed_s)
            if complete or passed_s - wrote_at.get(rank, passed_s) > RUNNING_S:
                waiting.remove(rank)
    return list(_answers(children, ranks))


def _answers(children: Children, ranks: Sequence[int | None]) -> Iterator[StacksAnswer]:
    deadline = time.monotonic() + PY_SPY_S
    for rank in ranks:
        name = children.name(rank)
        text, complete = take_stacks(children.stacks_fd(rank), MOST_BYTES)
        clear_stacks(children.stacks_fd(rank))
        if complete:
            yield StacksAnswer(rank, name, text, True)
            continue
        pid = children.find_pid(rank)
        state = _state(pid) if pid is not None else ""
        seen = _py_spy(pid, state, deadline) if pid is not None else ""
        if text:
            why = "(no Python code ran: something holds the interpreter lock)"
            yield StacksAnswer(rank, name, f"{text}{why}\n{seen}", True)
        else:
            why = STATES.get(state, f"it is in state {state}") if state else ""
            words = f"({name} did not answer{f': {why}' if why else ''})\n"
            yield StacksAnswer(rank, name, f"{words}{seen}", False)


def _state(pid: int) -> str:
    """Return the letter with which ``ps`` shows the state of a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _py_spy(pid: int, state: str, deadline: float) -> str:
    """Return the stacks that py-spy reads from outside, or the reason why it cannot read them.

    py-spy pauses the process to read C frames. If the process is stopped or blocked, the stacks
    have no C frames. Return an empty string if py-spy is not installed.
    """
    # A job's PATH may lack the virtual environment.
    own = Path(sys.executable).with_name(PY_SPY)
    program = str(own) if own.exists() else shutil.which(PY_SPY)
    if program is None:
        return ""
    failed = ""
    for option in (
        ("--nonblocking",) if state in (*HELD, BLOCKED) else ("--native", "--nonblocking")
    ):
        try:
            left_s = deadline - time.monotonic()
            command = [program, "dump", option, "--pid", str(pid)]
            late = child.ChildEnd(None)
            done = child.run(command, left_s, kept_bytes=MOST_BYTES) if left_s > 0 else late
        except OSError as error:
            return f"({PY_SPY}: {error})\n"
        if done.code is None:
            return f"({PY_SPY} did not finish in time)\n"
        if done.code == 0:
            return SEEN + done.output.decode(errors="replace")
        failed = done.errors.partition("\n")[0]
    denied = DENIED if "ermission" in failed else ""
    return f"({PY_SPY} cannot read the process: {failed}{denied})\n"


def top_frame(text: str) -> str:
    """Return the code position of the main thread, such as ``rewards.py:44 in __call__``."""
    own, _, seen = text.partition(SEEN)
    parts = MAIN_THREAD.split(own)  # The fault handler lists the main thread last.
    frame = FRAME.search(parts[-1]) if len(parts) > 1 else None
    parts = SEEN_THREAD.split(seen)  # py-spy lists the main thread first.
    frame = frame or (SEEN_FRAME.search(parts[1]) if len(parts) > 1 else None)
    if frame is None:
        return ""
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['name']}"


class Witness:
    """Writes the stacks of one host into files."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._files: deque[Path] = deque()

    def take(
        self,
        incarnation: int,
        number: int,
        why: str,
        pause: Callable[[float], None],
        ranks: Collection[int] | None = None,
    ) -> Stacked:
        """Write a file with stacks; return the message to the master about the file.

        ``pause`` is the function that waits. ``ranks`` None means all ranks of the host, the master
        and this agent.
        """
        host = self._host
        there = host.children.witnesses()
        wanted = [rank for rank in there if ranks is None or rank in ranks]
        answers = collect(host.children, wanted, pause)
        rows = self._rows(answers)
        own = f"\n=== the agent\n{own_stacks(MOST_BYTES)}" if ranks is None else ""
        path = host.paths.stacks(
            host.group.name, host.identity.task, host.identity.attempt, incarnation, number
        )
        try:
            text = self._text(incarnation, why, answers, rows) + own
            atomic.replace(path, text.encode(), durable=False)
            self._keep(path)
        except EnvironmentFailure as error:
            logger.warning("cannot write the stacks: %s", error)
        return Stacked(
            group=host.group.name,
            task=host.identity.task,
            number=number,
            file=str(path.relative_to(host.paths.run)),
            ranks=tuple(rows),
        )

    def _rows(self, answers: Sequence[StacksAnswer]) -> list[RankProgress]:
        """Return the activity of the ranks, with the code position of each rank that answered."""
        frames = {answer.rank: top_frame(answer.text) for answer in answers}
        return [replace(row, frame=frames.get(row.rank, "")) for row in self._host.children.doing()]

    def _text(
        self,
        incarnation: int,
        why: str,
        answers: Sequence[StacksAnswer],
        rows: Sequence[RankProgress],
    ) -> str:
        identity = self._host.identity
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        parts = [f"{identity.label} on {identity.host}, incarnation {incarnation}, {when}: {why}\n"]
        doing = {row.rank: hang.describe(row) for row in rows}
        for answer in answers:
            does = f": {doing[answer.rank]}" if answer.rank in doing else ""
            parts.append(f"\n=== {answer.name}{does}\n{answer.text}")
        return "".join(parts)

    def _keep(self, path: Path) -> None:
        self._files.append(path)
        while len(self._files) > MOST_FILES:
            atomic.remove(self._files.popleft())
