"""Make this folder's data: sums of two numbers with two digits, asked in English.

    python examples/sums/make_data.py

All sums have two digits, too. ``heldout.jsonl`` has 128 of them. ``train.jsonl`` has 1,024 others:
no held-out pair of numbers occurs in it, in either order. A test compares the files with the output
of this program.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBERS = range(10, 100)
HIGHEST_SUM = 99
HELD_OUT = 128
TRAIN = 1024


def row(a: int, b: int) -> dict[str, str]:
    return {
        "id": f"{a}+{b}",
        "prompt": f"What is {a} + {b}? Answer with the number only.",
        "answer": str(a + b),
    }


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows for training and the held-out rows."""
    chosen = random.Random("sums")
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a < b and a + b <= HIGHEST_SUM]
    chosen.shuffle(pairs)
    ordered = [pair if chosen.random() < 0.5 else pair[::-1] for pair in pairs]
    rows = [row(a, b) for a, b in ordered[: HELD_OUT + TRAIN]]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write(folder: Path) -> None:
    """Write both files into ``folder``."""
    for name, rows in zip(("train", "heldout"), problems(), strict=True):
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
