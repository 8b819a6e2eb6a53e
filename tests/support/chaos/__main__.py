"""Kill writers of the file protocols at every operation: scripts/chaos-files [OPTIONS]"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.support.chaos import (
    commits,
    control,
    files,
    histories,
    preparations,
    samples,
    submissions,
    weights,
)
from tests.support.chaos.schedule import Runner, Scenario, ViolationError

SCENARIOS = {
    scenario.name: scenario
    for module in (files, histories, control, commits, preparations, samples, submissions, weights)
    for scenario in module.SCENARIOS
}


def attack(scenario: Scenario, folder: Path, seed: int, schedules: int) -> dict[str, object]:
    """Run schedules until all are done; kill points cycle through all operations of the victim."""
    killed: Counter[str] = Counter()
    runner = Runner(scenario)
    longest = runner.run(_fresh(folder), seed, None).victim_operations
    for number in range(1, schedules):
        kill_at = spread(number, 2 * longest + 2)
        try:
            outcome = runner.run(_fresh(folder), seed + number, kill_at)
        except ViolationError as error:
            raise ViolationError(
                f"{scenario.name}, seed {seed + number}, kill at {kill_at}: {error.args[0]}\n"
                f"again: --scenario {scenario.name} --seed {seed + number} --kill-at {kill_at}"
            ) from error
        longest = max(longest, outcome.victim_operations)
        killed[outcome.killed_at or ""] += 1
    runner.close()
    kills = killed.total() - killed.pop("", 0)
    return {
        "scenario": scenario.name,
        "schedules": schedules,
        "kills": kills,
        "points": len(killed),
        "operations": longest,
    }


def show(scenario: Scenario, folder: Path, seed: int, kill_at: int) -> None:
    """Repeat one schedule, event by event."""
    try:
        outcome = Runner(scenario).run(_fresh(folder), seed, kill_at)
    except ViolationError as error:
        print("\n".join(json.dumps(event) for event in error.args[1].events))
        raise
    print("\n".join(json.dumps(event) for event in outcome.events))


def spread(number: int, count: int) -> int:
    """Return a number below ``count``. Consecutive indices visit all numbers once."""
    stride = round(count * 0.618)
    while math.gcd(stride, count) > 1:
        stride += 1
    return number * stride % count


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos-files", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=200, help="of each scenario")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--kill-at", type=int, help="one schedule, killed there; prints its events")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    logging.disable(logging.WARNING)  # Failures are expected here.
    gc.freeze()  # forked actors then share the pages of all these modules
    try:
        for name in options.scenario or sorted(SCENARIOS):
            began = time.monotonic()
            if options.kill_at is not None:
                show(SCENARIOS[name], folder / "run", options.seed, options.kill_at)
                continue
            result = attack(SCENARIOS[name], folder / "run", options.seed, options.schedules)
            print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    except ViolationError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
