"""Compare the start of commands with the start of Python: ``python scripts/bench/cli.py``.

Prints one JSON object. For each command, it has wall and CPU time in seconds, and the ratio and the
difference between its CPU time and the CPU time of ``python -c pass`` in the same round, each as
[median, minimum, maximum]. (Times depend on the machine, ratios hardly.) Commands take turns, so
that other load affects all of them. If the CPU time is much below the wall time, the machine was
busy and only the CPU time is meaningful.

The trials that ``status`` shows have finished after 200 steps and 40 commits. ``--trials`` trials
have an overview (see slurmrl/watch/overview.py). The trials of ``status (no overview)`` have none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.env import user_name
from slurmrl.fsio import atomic
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end
from slurmrl.run.metrics import encode
from slurmrl.run.paths import RunPaths
from slurmrl.watch import overview

REPOSITORY = Path(__file__).resolve().parents[2]
BARE = "python -c pass"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
"""Environment of the commands. It allows bytecode, which users of slurmrl also have."""
STEPS, EVERY, METRICS = 200, 5, 40


def commands(root: Path, trials: int) -> dict[str, list[str]]:
    slurmrl = [sys.executable, "-m", "slurmrl"]
    status = [*slurmrl, "status", "--root"]
    return {
        BARE: [sys.executable, "-c", "pass"],
        "slurmrl --help": [*slurmrl, "--help"],
        "slurmrl submit --help": [*slurmrl, "submit", "--help"],
        "slurmrl status (no trials)": [*status, str(root / "none")],
        "slurmrl status TRIAL": [*status, str(root / "kept"), "bench/1"],
        f"slurmrl status ({trials} trials)": [*status, str(root / "kept")],
        f"slurmrl status ({trials} trials, no overview)": [*status, str(root / "bare")],
    }


def make_trials(root: Path, trials: int, *, kept: bool) -> None:
    """Write ``trials`` finished trials below a root folder."""
    first = RunPaths.of(root, user_name(), "bench", "1")
    for directory in first.directories():
        atomic.make_private_directory(directory)
    first.identity.write_text("{}")
    first.plan.write_text(json.dumps({"groups": []}))
    writer = begin(History(first.history), {"hosts": ["n0"], "link": 0, "submission": 1})
    events = EventWriter(first, "master.1")
    for step in range(EVERY, STEPS + 1, EVERY):
        writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}.1"})
        events.write("commit", step=step, seconds=0.5, stall_s=0.1)
    values = {f"metric{number}": number / 7 for number in range(METRICS)}
    lines = ({"step": 1 + n, "time/total": 1.5, "reward": 0.5, **values} for n in range(STEPS))
    first.metrics.write_bytes(b"".join(map(encode, lines)))
    end(History(first.history), Kind.FINISHED, {"step": STEPS, "reason": "total_steps"})
    if kept:
        overview.keep_overview(first)
    for number in range(2, trials + 1):
        shutil.copytree(first.run, first.run.with_name(str(number)))


class Times(NamedTuple):
    wall_s: float
    cpu_s: float


def run(command: Sequence[str]) -> Times:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Times(wall_s, cpu_s)


def measure(rounds: int, trials: int) -> dict[str, dict[str, Spread]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_trials(root / "kept", trials, kept=True)
        make_trials(root / "bare", trials, kept=False)
        timed = commands(root, trials)
        for command in timed.values():
            run(command)  # write byte code and warm the page cache
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
        "ratio": Spread.of((one.cpu_s / other.cpu_s for one, other in pairs), 4),
        "more_s": Spread.of((one.cpu_s - other.cpu_s for one, other in pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--trials", type=int, default=1000, help="(default: %(default)s)")
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds, options.trials), indent=2))


if __name__ == "__main__":
    main()
