"""The error with which the log of a server ends. No torch.

SGLang logs a traceback as one message (``[2026-01-02 03:04:05 TP0] Scheduler hit an exception:
Traceback …``), vLLM with a prefix on every line (``(EngineCore pid=7) ERROR 01-02 03:04:05
[core.py:718] ValueError: …``). Both end with tracebacks of processes that only waited for the one
that failed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurmrl.parallel.gpu_faults import find_in

TAIL_BYTES: Final = 256 * 1024
"""How much of a log's end is read: tracebacks of several ranks."""
LAST_LINES: Final = 5
MOST_CHARACTERS: Final = 500
"""Of an error in a message."""
TRACEBACK: Final = "Traceback (most recent call last):"
_PREFIX: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?"
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] )?"
)
"""Of a line of vLLM's or SGLang's log."""
_TOLERATED: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?(DEBUG|INFO|WARNING) \d\d-\d\d "
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] \[http_server\] Error: "
)
"""What a server goes on after: vLLM's warnings, with their tracebacks, and requests that SGLang has
refused."""
_RAISED: Final = re.compile(r"(?=\S*[a-z])[A-Za-z_][\w.]*(: .*)?$")
"""The last line of a traceback."""
_ERROR: Final = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|\b[Ee]rror: ")
_CONSEQUENCE: Final = re.compile(
    r"root cause|EngineDeadError|scheduler is dead"
    r"|^(\w+\.)*(EOFError|BrokenPipeError|CancelledError|KeyboardInterrupt|SystemExit)\b"
)
"""Errors of processes that have lost another one."""
_OF_THE_HOST: Final = re.compile(
    r"^(\w+\.)*(OSError|IOError|MemoryError|TimeoutError|\w+NotFoundError|PermissionError"
    r"|Connection\w*Error|Dist\w+Error)\b"
    r"|\[Errno \d+\]|No space left|Cannot allocate memory|cannot open shared object file"
)
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class ServerLog:
    """The end of a log, from its position ``begin`` on."""

    path: Path
    lines: tuple[str, ...] = ()
    """The last ones that are not empty."""
    error: str = ""
    """That of the last traceback, or the last line about an error; empty if there is none."""

    @property
    def kind(self) -> str:
        """The error without its numbers, which differ from start to start."""
        return _NUMBER.sub("#", self.error)

    @property
    def of_the_host(self) -> bool:
        """Whether a server on another host may not meet the error."""
        return bool(_OF_THE_HOST.search(self.error)) or find_in(self.error) is not None

    def __str__(self) -> str:
        where = f"its log is {self.path}"
        if self.error:
            return f"{self.error}; {where}"
        return "\n".join([f"{where}, which ends with:", *self.lines]) if self.lines else where


def read_end(path: Path, begin: int) -> ServerLog:
    """Read the end of a log, of which this start of the server has written what follows ``begin``
    bytes. A log that cannot be read counts as empty."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ServerLog(path)
    lines = text.splitlines()
    last = tuple(line for line in lines[-LAST_LINES:] if line.strip())
    return ServerLog(path, last, last_error(lines))


def last_error(lines: Sequence[str]) -> str:
    """The error of the last traceback, those of processes that have lost another one only if there
    are no others; without a traceback the last line about an error."""
    lines = [line for line in lines if not _TOLERATED.match(line)]
    raised = list(_raised([_PREFIX.sub("", line.rstrip(), count=1) for line in lines]))
    causes = [error for error in raised if not _CONSEQUENCE.search(error)]
    if raised:
        return (causes or raised)[-1][:MOST_CHARACTERS]
    told = (line.strip() for line in reversed(lines) if _ERROR.search(line))
    return next(told, "")[:MOST_CHARACTERS]


def _raised(lines: Sequence[str]) -> Iterator[str]:
    """The error of each traceback, with what its message says in indented lines below."""
    inside = False
    for index, line in enumerate(lines):
        if line.endswith(TRACEBACK):
            inside = True
        elif inside and _RAISED.match(line):
            inside = False
            yield " ".join([line, *_indented(lines[index + 1 :])])


def _indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(" ") or not line.strip():
            return
        yield line.strip()
