"""Sections of the report: programs with time limits. No section can prevent the next section."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HEAD_CHARACTERS, TAIL_CHARACTERS = 6_000, 40_000
"""Number of characters at the start and end of a section's output that the report keeps."""
ENDING = ((signal.SIGINT, 12.0), (signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0))
"""Signals for a section that takes too long, with the seconds to wait after each. After SIGINT, the
section can clean up. SIGABRT makes faulthandler print all stacks."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Section:
    name: str
    about: str
    """Line about the section in the report."""
    command: tuple[str, ...]
    seconds: float
    """Minimum time limit. Time that earlier sections do not need is added."""
    skip: str = ""
    """Reason why the section cannot run here; "" if it can."""


@dataclass(frozen=True)
class Result:
    section: Section
    status: str
    failed: bool = False
    seconds: float = 0.0
    output: str = ""

    @property
    def last_line(self) -> str:
        lines = [line.strip(" =") for line in self.output.splitlines()]
        return next((line for line in reversed(lines) if line), "")


def adopt_orphans() -> None:
    """Adopt the processes that a section leaves behind, so that `end_children` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def limit_s(sections: list[Section], left_s: float) -> float:
    """Return the time limit of the first section if ``left_s`` seconds are left for all."""
    later = sum(section.seconds for section in sections[1:])
    share = min(1.0, left_s / (later + sections[0].seconds))
    return left_s - share * later


def run(section: Section, limit: float, folder: Path, environ: Mapping[str, str]) -> Result:
    """Run a section in ``folder`` for at most ``limit`` seconds, and kill all its processes."""
    if section.skip:
        return Result(section, f"skipped: {section.skip}")
    began = time.monotonic()
    with tempfile.TemporaryFile("w+b") as file:
        child = subprocess.Popen(
            section.command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            late = not _ends(child, limit)
            if late:
                _end(child)
        finally:
            end_children()
        output = _shortened(file.fileno())
    seconds, code = time.monotonic() - began, child.returncode
    if late:
        return Result(section, f"TIMED OUT after {limit:.0f} s", True, seconds, output)
    status = f"FAILED (exit {code})" if code else "passed"
    return Result(section, status, code != 0, seconds, output)


def _ends(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, seconds in ENDING:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        if _ends(child, seconds):
            return


def end_children(limit: float = 10.0) -> None:
    """Kill all children of this process, and the orphans that it adopts from them."""
    deadline = time.monotonic() + limit
    while (pids := _children()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


def _shortened(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    if size <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return os.pread(descriptor, size, 0).decode(errors="replace")
    head = os.pread(descriptor, HEAD_CHARACTERS, 0).decode(errors="replace")
    tail = os.pread(descriptor, TAIL_CHARACTERS, size - TAIL_CHARACTERS).decode(errors="replace")
    left_out = size - HEAD_CHARACTERS - TAIL_CHARACTERS
    return f"{head}\n… {left_out} characters left out …\n{tail}"
