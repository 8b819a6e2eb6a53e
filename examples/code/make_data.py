"""Make this folder's data: small programming problems with tests, and a tokenizer.

    python examples/code/make_data.py

``train.jsonl`` and ``heldout.jsonl``, for RL, have problems with their tests and a solution.
``programs.jsonl``, for SFT, has one program per training problem. A third of the programs fail
their tests, and half of them take one line more than necessary. Run the script again after a
change: a test compares the files with its output.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from slurmrl.data.tokenizer import save_tokenizer

FOLDER = Path(__file__).parent
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS = range(2, 21)
INPUTS = (-3, 5)
TRAIN, HELD_OUT = 2048, 256
WORDS = ["```", "python", "def", "return", "f", "x", "y", *SIGNS, "then"]
SYMBOLS = ["<pad>", "<eos>", "<unk>", *WORDS, "    ", *"0123456789", *"\n ()+-*=:,."]

Problem = tuple[str, int, str, int]
"""Two operations, each with its number: ``("plus", 3, "times", 4)``."""


def one_line(problem: Problem) -> list[str]:
    """Return the body of the shortest program."""
    one, a, two, b = problem
    first = f"x {SIGNS[one]} {a}"
    first = f"({first})" if two == "times" != one else first
    return [f"return {first} {SIGNS[two]} {b}"]


def two_lines(problem: Problem) -> list[str]:
    """Return the body of a program that stores the result of the first operation."""
    one, a, two, b = problem
    return [f"y = x {SIGNS[one]} {a}", f"return y {SIGNS[two]} {b}"]


def fenced(body: list[str]) -> str:
    """Return a completion: a block of Python with the function ``f``."""
    return "\n".join(["```python", "def f(x):", *(f"    {line}" for line in body), "```"])


def prompt(problem: Problem) -> str:
    one, a, two, b = problem
    return f"x {one} {a}, then {two} {b}.\n"


def row(problem: Problem) -> dict[str, Any]:
    """Return a problem with a solution and its tests."""
    apply = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    one, a, two, b = problem
    tests = [f"assert f({x}) == {apply[two](apply[one](x, a), b)}" for x in INPUTS]
    return {"prompt": prompt(problem), "answer": fenced(one_line(problem)), "tests": tests}


def attempt(problem: Problem, draw: random.Random) -> dict[str, str]:
    """Return a problem with a program that may be wrong or longer than necessary."""
    one, a, two, b = problem
    if draw.random() < 1 / 3:
        b = draw.choice([number for number in NUMBERS if number != b])
    body = draw.choice([one_line, two_lines])((one, a, two, b))
    return {"prompt": prompt(problem), "answer": fenced(body)}


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per word, digit or sign."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"```|[a-z]+|    |[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return core


def write(folder: Path) -> None:
    """Write all files of the example's data into ``folder``."""
    draw = random.Random("code")
    every = [(one, a, two, b) for one in SIGNS for a in NUMBERS for two in SIGNS for b in NUMBERS]
    problems = draw.sample(every, TRAIN + HELD_OUT)
    train = problems[:TRAIN]
    files = {
        "programs": [attempt(problem, draw) for problem in train],
        "train": [row(problem) for problem in train],
        "heldout": [row(problem) for problem in problems[TRAIN:]],
    }
    for name, rows in files.items():
        text = "".join(json.dumps(line) + "\n" for line in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer(), folder / "tokenizer", end="<eos>", pad="<pad>")


if __name__ == "__main__":
    write(FOLDER)
