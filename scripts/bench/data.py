#!/usr/bin/env python
"""Measure the cost of data for a rank: scripts/bench/data.py [--rows N] [--batch N] [--folder DIR]

The script prepares a dataset once, finds it again, opens it, and reads it like a rank. Then it
divides completions of random lengths among ranks, by equal numbers of items and balanced by tokens.
It prints by how much the largest share of tokens exceeds the average.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurmrl.config.schema import Dataset
from slurmrl.data import dataset, preparation
from slurmrl.data.order import balanced_partition, even_partition
from slurmrl.data.prepared import PreparedRows
from slurmrl.data.tokenizer import load_tokenizer, train_bpe

WORDS = ("a", "farmer", "has", "sold", "hens", "and", "eggs", "for", "dollars", "each", "day", "of")
VOCABULARY = 8192
LIMIT = 100
MINIBATCHES = 4


def row(number: int) -> dict[str, str]:
    """Return a question of about 60 words with numbers, as in GSM8K."""
    chance = random.Random(number)
    words = [
        str(chance.randrange(1000)) if chance.random() < 0.2 else chance.choice(WORDS)
        for _ in range(chance.randint(30, 90))
    ]
    return {"id": f"q{number}", "prompt": " ".join(words), "answer": str(chance.randrange(10**6))}


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextmanager
def measured(what: str) -> Iterator[None]:
    began, began_cpu_s = time.monotonic(), cpu_s()
    yield
    wall_s, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{what:34s} {wall_s:9.3f} s  {cpu_s() - began_cpu_s:9.3f} CPU s  peak {peak >> 10} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument(
        "--folder", type=Path, help="folder to write to (default: a temporary folder)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        path = folder / "rows.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(row(number)) + "\n" for number in range(options.rows))
        train_bpe(
            [row(number)["prompt"] for number in range(2000)], VOCABULARY, folder / "tokenizer"
        )
        tokenizer = load_tokenizer(folder / "tokenizer")
        config = Dataset(type="prompt", path=str(path), max_prompt_tokens=LIMIT)
        with measured("nothing (imports, tokenizer)"):
            pass
        for what in ("prepare", "find (next incarnation)"):
            with measured(what):
                directory = preparation.prepare(folder / "data", 1, config, tokenizer, str)
        with measured("open (each rank)"):
            opened = dataset.make(config, [PreparedRows(directory)])
        chance = random.Random(0)
        items = [(0, index) for index in chance.sample(range(opened.size), options.batch)]
        with measured(f"ids and lengths of {options.batch} items"):
            opened.meta(items)
        for ranks in (1, 8):
            with measured(f"{options.batch // ranks} items"):
                opened.sample(items[::ranks])
        sizes = {file.name: file.stat().st_size >> 20 for file in directory.iterdir()}
        print(f"{path.stat().st_size >> 20} MiB; {opened.size} rows kept; MiB on disk: {sizes}")
    for ranks in (2, 8, 64):
        compare_shares(options.batch, ranks)


def compare_shares(items: int, ranks: int) -> None:
    """Compare shares. Each of four minibatches takes as long as its largest share."""
    chance = random.Random(0)
    prompts = [chance.randint(50, 150) for _ in range(items)]
    completions = [min(int(chance.lognormvariate(5.5, 1.0)), 2048) for _ in range(items)]
    lengths = [prompt + made for prompt, made in zip(prompts, completions, strict=True)]
    shares = {
        "equal numbers": even_partition(prompts, ranks, MINIBATCHES),
        "balanced": balanced_partition(lengths, ranks, MINIBATCHES),
    }
    size = items // MINIBATCHES
    for name, parts in shares.items():
        largest = [
            max(sum(lengths[i] for i in part if start <= i < start + size) for part in parts)
            for start in range(0, items, size)
        ]
        excess = sum(largest) * ranks / sum(lengths) - 1
        print(f"{items} items on {ranks:2d} ranks, {name:13s}: {excess:7.1%} above the average")


if __name__ == "__main__":
    main()
