"""Make this folder's data: sums and products of two-digit numbers, for a policy with a calculator.

    python examples/tools/make_data.py

``conversations.jsonl``, for SFT, answers half of the problems directly, with one wrong digit. For
the other half, it uses the calculator. ``train.jsonl`` and ``heldout.jsonl``, for RL, have problems
with their answers. Run the script again after a change; a test compares the files with its output.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slurmrl.data.tokenizer import save_tokenizer

FOLDER = Path(__file__).parent
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", *"+*=[]()c-."]
CONVERSATIONS, TRAIN, HELD_OUT = 3072, 2048, 256


def problems() -> list[dict[str, str]]:
    """Return different problems in random order."""
    draw = random.Random("tools")
    pairs = [(a, b, sign) for a in range(10, 100) for b in range(10, 100) for sign in "+*"]
    return [
        {"prompt": f"{a}{sign}{b}=", "answer": str(a + b if sign == "+" else a * b)}
        for a, b, sign in draw.sample(pairs, CONVERSATIONS + TRAIN + HELD_OUT)
    ]


def conversation(row: dict[str, str], place: int, draw: random.Random) -> dict[str, Any]:
    turns = [("user", row["prompt"])]
    if place % 2:
        at = draw.randrange(len(row["answer"]))
        digit = draw.choice([digit for digit in "0123456789" if digit != row["answer"][at]])
        turns.append(("assistant", row["answer"][:at] + digit + row["answer"][at + 1 :]))
    else:
        turns += [
            ("assistant", f"[c({row['prompt'][:-1]})]"),
            ("tool", f"{row['answer']}="),
            ("assistant", row["answer"]),
        ]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


def write(folder: Path) -> None:
    """Write all files of the example's data into ``folder``."""
    rows = problems()
    draw = random.Random("conversations")
    files = {
        "conversations": [
            conversation(row, place, draw) for place, row in enumerate(rows[:CONVERSATIONS])
        ],
        "train": rows[CONVERSATIONS : CONVERSATIONS + TRAIN],
        "heldout": rows[-HELD_OUT:],
    }
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer(), folder / "tokenizer", end="<eos>", pad="<pad>")


if __name__ == "__main__":
    write(FOLDER)
