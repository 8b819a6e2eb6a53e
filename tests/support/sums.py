"""A strict reward for sums: the last number of the completion is the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def last_number(
    prompts: Sequence[str], completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    return [
        float(is_right(text, str(row["answer"])))
        for text, row in zip(completions, rows, strict=True)
    ]


def is_right(completion: str, answer: str) -> bool:
    return re.findall(r"\d+", completion)[-1:] == [answer]
