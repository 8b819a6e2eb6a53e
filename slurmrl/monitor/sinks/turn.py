"""Whose turn it is to hand evaluations to the sinks of a trial: those of several checkpoints and
suites may end at the same time, on any hosts.

The next turn is taken by the exclusive creation of its file. A holder says when it is through. It
also ends itself after HELD_S, so one of which nothing has been heard for longer is gone. No clock
of another machine is used.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from slurmrl.fsio import atomic

HELD_S: Final = 60
"""Longest time of a turn."""
GONE_S: Final = 75.0
"""After this time without news a holder has ended itself, however slowly its files appear here."""
LOOK_S: Final = 0.5
ENDED: Final = ".ended"


@contextmanager
def turn(
    folder: Path, sleep: Callable[[float], None] = time.sleep, held_s: int = HELD_S
) -> Iterator[None]:
    """Wait for the turn and hold it; the process is killed if that takes longer than ``held_s``.
    Raises EnvironmentFailure."""
    number = _taken(folder, sleep, held_s)
    try:
        yield
    finally:
        atomic.exclusive_create(folder / f"{number}{ENDED}", b"")
        signal.alarm(0)
        for name in atomic.list_names(folder):
            if _number(name) < number:
                atomic.remove(folder / name)


def _taken(folder: Path, sleep: Callable[[float], None], held_s: int) -> int:
    """The number of the turn that is now this process's, which has ``held_s`` for it."""
    atomic.make_private_directory(folder)
    waited_for, waited_s = 0, 0.0
    while True:
        names = atomic.list_names(folder)
        newest = max(map(_number, names), default=0)
        if newest != waited_for:
            waited_for, waited_s = newest, 0.0
        if not newest or f"{newest}{ENDED}" in names or waited_s >= GONE_S:
            signal.alarm(held_s)  # before others see the turn: this process may be stopped then
            if _created(folder, newest + 1):
                return newest + 1
            signal.alarm(0)
        sleep(LOOK_S)
        waited_s += LOOK_S


def _created(folder: Path, number: int) -> bool:
    """Whether a turn is now this process's. Between its last look and this one, others may have had
    that turn and later ones, and have removed its file."""
    if not atomic.exclusive_create(folder / str(number), uuid.uuid4().hex.encode()):
        return False
    if max(map(_number, atomic.list_names(folder)), default=0) <= number:
        return True
    atomic.remove(folder / str(number))
    return False


def _number(name: str) -> int:
    """That of a turn's file; 0 for what is none."""
    text = name.removesuffix(ENDED)
    return int(text) if text.isdecimal() else 0
