"""Make this folder's data: sums of two-digit numbers, written from the last digit to the first.

    python examples/addition/make_data.py

``12+34=`` has the answer ``64``. The held-out problems are 256 pairs of numbers in both orders.
``train.jsonl`` has all other problems, for SFT and for RL. ``pairs.jsonl`` and
``heldout_pairs.jsonl`` have a right and a wrong answer to each problem, for reward models.
``chat.jsonl`` and ``heldout_chat.jsonl`` have conversations: a sum, then a number that is added to
it. Run the script again after a change; a test compares the files with its output.

``sampled_pairs.jsonl`` and ``sampled_labels.jsonl``, for DPO and KTO, are answers of a model
(judged.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slurmrl.data.tokenizer import save_tokenizer

FOLDER = Path(__file__).parent
NUMBERS = range(10, 100)
HELD_OUT_PAIRS = 256
JUDGED = 3072
"""Number of problems with right and wrong answers."""
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", "-"]


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows for training and the held-out rows."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a < b]
    held_out = set(random.Random("addition").sample(pairs, HELD_OUT_PAIRS))
    train, test = [], []
    for a in NUMBERS:
        for b in NUMBERS:
            row = {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}
            (test if (min(a, b), max(a, b)) in held_out else train).append(row)
    random.Random("order").shuffle(test)
    return train, test


def pairs(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return each problem with its answer and a copy of the answer with one wrong digit."""
    draw = random.Random("pairs")
    made = []
    for row in rows:
        right = row["answer"]
        place = draw.randrange(len(right))
        digit = draw.choice([digit for digit in "0123456789" if digit != right[place]])
        wrong = right[:place] + digit + right[place + 1 :]
        made.append({**_problem(row), "chosen": right, "rejected": wrong})
    return made


def conversations(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return conversations of two turns: the problem, and one more summand."""
    draw = random.Random("chat")
    made = []
    for row in rows:
        total, more = int(row["answer"][::-1]), draw.choice(NUMBERS)
        turns = [row["prompt"], row["answer"], f"+{more}=", str(total + more)[::-1]]
        roles = ("user", "assistant") * 2
        messages = [{"role": r, "content": text} for r, text in zip(roles, turns, strict=True)]
        made.append({"id": row["id"], "messages": messages})
    return made


def _problem(row: dict[str, str]) -> dict[str, str]:
    return {"id": row["id"], "prompt": row["prompt"]}


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per symbol."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


def write(folder: Path) -> None:
    """Write all files of the example's data into ``folder``."""
    train, held_out = problems()
    some = random.Random("some").sample(train, JUDGED)
    files = {
        "train": train,
        "heldout": held_out,
        "pairs": pairs(some),
        "heldout_pairs": pairs(held_out),
        "chat": conversations(some),
        "heldout_chat": conversations(held_out),
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer(), folder / "tokenizer", end="<eos>", pad="<pad>")


if __name__ == "__main__":
    write(FOLDER)
