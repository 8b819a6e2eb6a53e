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


@cache
def commit() -> str:
    """Return the hash of the current commit, ``0`` outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"


def share(cases: Sequence[T], shares: int, chosen_by: str) -> Sequence[T]:
    """Return the cases that a commit's hash chooses; ``shares`` commits in a row may miss some."""
    return cases[int(chosen_by, 16) % shares :: shares]


def rotating(*cases: Any, shares: int | None = None) -> list[Any]:
    """Return cases for ``parametrize``, of which only a share lacks the mark ``soak``.

    Without ``shares``, one case lacks the mark. Cases with several arguments are ``pytest.param``.
    """
    chosen = share(range(len(cases)), shares or len(cases), commit())
    given = [case if isinstance(case, Case) else pytest.param(case) for case in cases]
    return [
        case if place in chosen else case._replace(marks=(*case.marks, pytest.mark.soak))
        for place, case in enumerate(given)
    ]


def in_turn(place: int, shares: int) -> Any:
    """Return a decorator that marks a test ``soak`` unless the commit's hash chooses ``place``."""
    mine = place in share(range(shares), shares, commit())
    return (lambda test: test) if mine else pytest.mark.soak
