"""Kill processes of a trial at seeded random moments: scripts/chaos [OPTIONS].

The trial must have the result of an undisturbed trial, bit for bit: weights, optimizer state,
metrics of each step (except times), and the samples of each step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.chaos_trials.causes import CAUSES, DEFAULT
from tests.support.chaos_trials.monkey import Kill
from tests.support.chaos_trials.runs import Setting, chaos, undisturbed
from tests.support.trials import processes


def table(kills: list[Kill]) -> str:
    head = f"{'kill':>4}  {'cause':<12} {'moment':<20} {'incarnation':<12} {'went on':<12} seconds"
    return "\n".join([head, *(_row(kill) for kill in kills)])


def _row(kill: Kill) -> str:
    numbers = f"{kill.incarnation} -> {kill.successor}" if kill.successor else kill.incarnation
    seconds = f"{kill.seconds:7.2f}" if kill.seconds is not None else "      -"
    plan = kill.plan
    return (
        f"{plan.number:>4}  {plan.cause:<12} {plan.moment:<20} {numbers!s:<12} "
        f"{kill.how or 'it ended':<12} {seconds}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--algorithm", choices=("sft", "ppo", "generate"), default="ppo")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=4)
    parser.add_argument(
        "--scheduler",
        choices=("local", "slurm"),
        default="local",
        help="slurm: two hosts (one for 1 rank) of the cluster that SLURM_CONF names",
    )
    parser.add_argument(
        "--causes",
        default=",".join(DEFAULT),
        help=f"separated by commas, of: {', '.join(CAUSES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank, in bfloat16 (default: on CPUs)"
    )
    parser.add_argument(
        "--mixed", action="store_true", help="ppo on 2 ranks, each model with a layout of its own"
    )
    parser.add_argument("--folder", type=Path, help="where to work, and leave the runs")
    options = parser.parse_args()
    options.causes = options.causes.split(",")
    if unknown := set(options.causes) - CAUSES.keys():
        parser.error(f"--causes: {', '.join(sorted(unknown))}; known are {', '.join(CAUSES)}")
    if options.kills < 1:
        parser.error("--kills must be at least 1")
    if options.mixed and (options.algorithm, options.ranks) != ("ppo", 2):
        parser.error("--mixed needs --algorithm ppo --ranks 2")
    return options


def attack(options: argparse.Namespace, folder: Path) -> list[str]:
    hosts = 2 if options.scheduler == "slurm" and options.ranks > 1 else 1
    setting = Setting(
        options.algorithm,
        options.ranks,
        options.kills,
        options.scheduler,
        hosts,
        options.gpu,
        options.mixed,
    )
    began = time.monotonic()
    calm = undisturbed(setting, folder / "undisturbed")
    print(
        f"{setting.algorithm}, {setting.ranks} ranks, {setting.steps} steps, undisturbed: "
        f"{time.monotonic() - began:.1f} s; start {calm.usual.start_s:.2f} s, "
        f"step {calm.usual.step_s:.3f} s, commit {calm.usual.commit_s:.3f} s",
        flush=True,
    )
    began = time.monotonic()
    differences, kills = chaos(setting, folder / "disturbed", options.seed, options.causes, calm)
    print(f"{table(kills)}\n{len(kills)} kills, {time.monotonic() - began:.1f} s", flush=True)
    return differences


def main() -> int:
    options = parse()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    found: list[str] = ["it did not come to an end"]
    try:
        found = attack(options, folder)
    finally:
        _end_processes(folder)
        if found:
            print(f"seed {options.seed}: {'; '.join(found)}\nsee {folder}", file=sys.stderr)
        elif options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if found else 0


def _end_processes(folder: Path) -> None:
    """End the remaining processes of local trials. Other trials end with their chain."""
    for run in folder.glob("*/runs/*/*/*"):
        for chain in processes(run)["chain"]:
            os.kill(chain, 9)


if __name__ == "__main__":
    sys.exit(main())
