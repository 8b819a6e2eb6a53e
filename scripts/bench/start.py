"""Measure how long a trial takes to start: scripts/bench/start.py [--ranks 8] [--rounds 3]

The trial is one step of SFT of a tiny decoder on one host, submitted to the local scheduler. The
script prints the seconds from the start of `slurmrl submit`, and from the start of the agent, to
the end of this step. It also prints the CPU seconds of all processes of the trial.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.run import events
from slurmrl.run.metrics import TIME
from slurmrl.workers.child_process import adopt_orphans
from tests.support.trials import Site, sft_config, wait_until


def measure(folder: Path, ranks: int) -> dict[str, float]:
    """Run one trial to its end."""
    site = Site(folder, {"OMP_NUM_THREADS": "1"})
    config = sft_config(total_steps=1)
    config["actor"]["backend"] = f"fsdp:d{ranks}"
    site.write("sft.yaml", config)
    used, began = _children_s(), time.time()
    site.slurmrl("submit", "sft.yaml", "--scheduler", "local", "--detach")
    wait_until("the end of the trial", _have_ended)
    rows = events.read_all(site.paths("sft/1"))
    agent = next(row["time"] for row in rows if row["writer"].startswith("agent"))
    trained = next(line[TIME] for line in site.metrics("sft/1") if line["step"] == 1)
    return {
        "submit": trained - began,
        "agent": trained - agent,
        "cpu": _children_s() - used,
    }


def _have_ended() -> bool:
    """Wait for the processes of the trial, which become children of this process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    adopt_orphans()
    found = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(folder), options.ranks))
        print(json.dumps(found[-1]), f"load {os.getloadavg()[0]:.1f}", flush=True)
    for name in ("submit", "agent", "cpu"):
        print(f"{name:8}{Spread.of(row[name] for row in found).text('.1f')} s")


if __name__ == "__main__":
    main()
