"""A strict reward for sums."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FINAL_NUMBER = re.compile(r"(?<![\w.,/+−-])([0-9]+)\.?\s*\Z")
"""Pattern of an integer at the end of a string. A full stop may follow. It is no part of another
number.
"""


def final_number(
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    finished: Sequence[bool],
) -> list[float]:
    """Return 1 for a finished completion whose last characters are the answer, else 0.

    Restating the question earns nothing, because it ends with one of the two summands.
    """
    return [
        float(ended and answer_of(text) == str(row["answer"]))
        for text, row, ended in zip(completions, rows, finished, strict=True)
    ]


def answer_of(completion: str) -> str | None:
    """Return the number at the end of a completion, or None without one."""
    found = FINAL_NUMBER.search(completion)
    return found[1] if found else None
