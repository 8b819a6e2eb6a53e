"""Start of the command line beside that of bare Python: ``python scripts/bench/cli.py``.

Prints one JSON object: for each command its wall and CPU time in seconds, and the ratio and the
difference of its wall time to that of ``python -c pass`` in the same round (machines differ, ratios
hold), each as [median, least, most]. Commands take turns, so that a busy moment hits all of them;
where the CPU time is much below the wall time, the machine was busy and only the former means
anything.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from spread import Spread

REPOSITORY = Path(__file__).resolve().parents[2]
BARE = "python -c pass"


def commands(root: str) -> dict[str, list[str]]:
    slurmrl = [sys.executable, "-m", "slurmrl"]
    return {
        BARE: [sys.executable, "-c", "pass"],
        "slurmrl --help": [*slurmrl, "--help"],
        "slurmrl submit --help": [*slurmrl, "submit", "--help"],
        "slurmrl status": [*slurmrl, "status", "--root", root],
    }


class Times(NamedTuple):
    wall_s: float
    cpu_s: float


def run(command: Sequence[str]) -> Times:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Times(wall_s, cpu_s)


def measure(rounds: int) -> dict[str, dict[str, Spread]]:
    with tempfile.TemporaryDirectory() as root:
        timed = commands(root)
        for command in timed.values():
            run(command)  # writes byte code and warms the page cache
        times: dict[str, list[Times]] = {name: [] for name in timed}
        for _ in range(rounds):
            for name, command in timed.items():
                times[name].append(run(command))
    return {name: _summary(taken, times[BARE]) for name, taken in times.items()}


def _summary(taken: Sequence[Times], bare: Sequence[Times]) -> dict[str, Spread]:
    pairs = list(zip(taken, bare, strict=True))
    return {
        "wall_s": Spread.of((one.wall_s for one in taken), 4),
        "cpu_s": Spread.of((one.cpu_s for one in taken), 4),
        "ratio": Spread.of((one.wall_s / other.wall_s for one, other in pairs), 4),
        "more_s": Spread.of((one.wall_s - other.wall_s for one, other in pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    print(json.dumps(measure(parser.parse_args().rounds), indent=2))


if __name__ == "__main__":
    main()
