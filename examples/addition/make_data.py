"""Makes this folder's data: two-digit additions whose answers are written last digit first.

    python examples/addition/make_data.py

``12+34=`` has the answer ``64``. The held-out problems are those of 256 pairs of numbers in
either order; ``train.jsonl`` holds all other problems, for SFT and for RL. Run it again after a
change; a test compares the files with what it makes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slurmrl.data.tokenizer import save_tokenizer

FOLDER = Path(__file__).parent
NUMBERS = range(10, 100)
HELD_OUT_PAIRS = 256
SYMBOLS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", "-"]


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(train, held out) rows."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a < b]
    held_out = set(random.Random("addition").sample(pairs, HELD_OUT_PAIRS))
    train, test = [], []
    for a in NUMBERS:
        for b in NUMBERS:
            row = {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]}
            (test if (min(a, b), max(a, b)) in held_out else train).append(row)
    random.Random("order").shuffle(test)
    return train, test


def tokenizer() -> Tokenizer:
    """One token for each symbol."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


def write(folder: Path) -> None:
    """All files of the example's data into ``folder``."""
    for name, rows in zip(("train", "heldout"), problems(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer(), folder / "tokenizer", end="<eos>", pad="<pad>")


if __name__ == "__main__":
    write(FOLDER)
