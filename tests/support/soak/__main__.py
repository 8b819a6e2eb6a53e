"""Disturb trials on a Slurm of their own, round after round: scripts/soak CASE [OPTIONS]"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.soak import slurm

CASES: dict[str, Callable[[Path, random.Random, int], None]] = {
    "black-hole": slurm.black_hole,
    "throttle": slurm.throttle,
}
"""Functions of a folder, a random generator and a number of rounds. They raise if a promise does
not hold."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("case", choices=sorted(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10, help="default 10")
    parser.add_argument("--folder", type=Path, help="where to work, and leave the runs")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        CASES[options.case](folder, random.Random(options.seed), options.rounds)
        print(f"{options.rounds} rounds, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
