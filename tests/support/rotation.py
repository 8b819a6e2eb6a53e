"""Cases that take turns: the commit chooses the cases that CI runs, and soak runs the others."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
Case: Any = type(pytest.param())

# Numbers of tests in several files that take turns. Each commit runs one test of each number.
ADAPTERS = 2  # adapters are trained, committed and read again
CODE_ERRORS = 4  # code of users fails
ENDS = 3  # the end of a job is explained
EVALUATIONS = 3  # each evaluation has one result despite kills
HANGS = 5  # a hang is detected and explained
HF_TRIALS = 5  # killed trials of transformers' models equal others
SERVER_ENDS = 4  # requests survive the end of a real server
SNAPSHOTS = 2  # jobs run the submitted code
SPARES = 5  # a spare host replaces a lost host
TASK_CHANGES = 3  # each item is trained once while rollout tasks come and go on Slurm
TASK_KILLS = 7  # rollout tasks, servers and weight versions survive kills


@cache
def commit() -> str:
    """Return the hash of the current commit, ``0`` outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"


def share(cases: Sequence[T], shares: int, chosen_by: str) -> Sequence[T]:
    """Return the cases that a commit's hash chooses; ``shares`` commits in a row may miss some."""
    return cases[int(chosen_by, 16) % shares :: shares]


def rotating(*cases: Any, shares: int | None = None, first: int = 0) -> list[Any]:
    """Return cases for ``parametrize``, of which only a share lacks the mark ``soak``.

    Without ``shares``, one case lacks the mark. Cases with several arguments are ``pytest.param``.
    Tests may divide ``shares`` places among them: ``first`` is the place of the first case.
    """
    shares = shares or len(cases)
    chosen = share(range(first + len(cases)), shares, commit())
    given = [case if isinstance(case, Case) else pytest.param(case) for case in cases]
    return [
        case if place in chosen else case._replace(marks=(*case.marks, pytest.mark.soak))
        for place, case in enumerate(given, first)
    ]


def in_turn(place: int, shares: int) -> Any:
    """Return a decorator that marks a test ``soak`` unless the commit's hash chooses ``place``."""
    mine = place in share(range(shares), shares, commit())
    return (lambda test: test) if mine else pytest.mark.soak
