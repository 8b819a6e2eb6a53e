"""Measure the time until a trial trains again after a failure: scripts/bench/recovery.py [OPTIONS]

On a private test bed of Slurm, the script disturbs a PPO trial of two ranks on two nodes by each
cause in turn. The script reports the seconds from the failure to the end of the next trained step,
by phase. It also reports Slurm's floor: the seconds in which an array of empty jobs starts its next
job after the same failure. Then it kills a worker once a minute and reports the share of the wall
time in steps that were kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.run import events
from slurmrl.run.history.slots import Kind
from tests.support import paced
from tests.support.chaos_trials.causes import CAUSES, strike
from tests.support.chaos_trials.monkey import succession
from tests.support.chaos_trials.watched import Watched
from tests.support.nodes import kill_node, node_of, preempt, private_bed, slurm
from tests.support.trials import Site, processes, wait_until

ALL = ("worker", "master", "agent", "supervisor", "stop", "warn", "preempt", "node")
"""Causes of failures. A lost node does not come back, so it is the last cause."""
EMPTY_JOB = """#!/bin/bash
#SBATCH --array=0-3%1 --nodes=2 --requeue --open-mode=append --output=/dev/null
#SBATCH --partition=low
echo $$ $(date +%s.%N) $SLURMD_NODENAME >> {starts}
exec sleep 600
"""
STEPS_BEFORE = 4
"""Number of steps that an incarnation trains before it is disturbed. They include a commit."""


def disturb(bed: Path, cause: str, run: Path, over: Callable[[], bool]) -> None:
    if cause == "preempt":
        preempt()
    elif cause == "node":
        kill_node(bed, run, node_of(processes(run)["supervisor"][0]))
    else:
        strike(CAUSES[cause], run, 0.9, over)


# -- Slurm's floor -------------------------------------------------------------------------------


def floor_s(bed: Path, folder: Path, cause: str) -> float | None:
    """Return the seconds from the failure to the next start of an empty job; None if the job
    continues.
    """
    if cause not in ("supervisor", "preempt", "node"):
        return None
    starts, script = folder / f"starts-{cause}", folder / f"{cause}.sh"
    script.write_text(EMPTY_JOB.format(starts=starts))
    job = slurm("sbatch", "--parsable", str(script))
    pid, _, node = wait_until("an empty job", lambda: list(_starts(starts)))[0]
    began = time.time()
    if cause == "supervisor":
        os.kill(int(pid), signal.SIGKILL)
    elif cause == "preempt":
        preempt()
    else:
        kill_node(bed, starts, str(node), also=[int(pid)])
    again = wait_until("its next start", lambda: list(_starts(starts))[1:])[0]
    slurm("scancel", job)
    wait_until("an empty queue", lambda: not slurm("squeue", "-h"))
    return float(again[1]) - began


def _starts(file: Path) -> Iterator[list[str]]:
    for line in file.read_text().splitlines() if file.exists() else []:
        yield line.split()


# -- one recovery --------------------------------------------------------------------------------


def recovery(bed: Path, trial: Watched, cause: str) -> dict[str, Any]:
    """Disturb the trial once and return the seconds by phase. A phase without a timestamp is part
    of the next phase.
    """
    settled(trial)
    before, run = trial.incarnation, trial.witness.paths.run
    killed = time.time()
    disturb(bed, cause, run, trial.over)

    def trains() -> bool:
        return trial.incarnation > before and trial.witness.has_trained(trial.incarnation)

    if not trial.until(f"recovery from {cause}", trains):
        raise SystemExit(f"the trial ended when {cause} was tried: {trial.witness.state.end}")
    trained = time.time()
    marks = [*_marks(trial, before, killed), ("first step", trained)]
    phases, last = {}, killed
    for name, at in marks:
        phases[name], last = round(max(at - last, 0.0), 2), max(at, last)
    how = succession(trial.witness.job(before), trial.witness.job(trial.incarnation))
    return {"cause": cause, "how": how, "seconds": round(trained - killed, 2), "phases": phases}


def settled(trial: Watched) -> None:
    """Wait until the current incarnation has trained some steps."""

    def steps() -> bool:
        return len(trial.witness.batches(trial.incarnation)) > STEPS_BEFORE

    if not trial.until("some steps", steps):
        raise SystemExit(f"the trial ended by itself: {trial.witness.state.end}")


def _marks(trial: Watched, before: int, killed: float) -> list[tuple[str, float]]:
    """Return the recorded ends of the phases of a recovery.

    The phases end when the failure is published, the next supervisor runs, the incarnation begins,
    the last agent joins, and all ranks have formed their groups and loaded.
    """
    seen = [event for event in events.read_all(trial.witness.paths) if event["time"] >= killed]
    now = trial.incarnation

    def first(kind: str, writer: str, **data: Any) -> float | None:
        return next(
            (
                float(event["time"])
                for event in seen
                if event["kind"] == kind
                and event["writer"].startswith(writer)
                and all(event.get(name) == value for name, value in data.items())
            ),
            None,
        )

    begun = next(
        record.time
        for record in trial.witness.records
        if record.kind is Kind.BEGIN and record.incarnation == now
    )
    joins = [
        event["time"]
        for event in seen
        if event["kind"] == "join" and event.get("incarnation") == now
    ]
    found = (
        ("detect", first("failure", "agent.", incarnation=before)),
        ("next job", first("start", "supervisor.")),
        ("start", begun),
        ("rendezvous", max(joins, default=None)),
        ("load", first("ready", f"master.{now}")),
    )
    return [(name, at) for name, at in found if at is not None]


# -- effective training time ---------------------------------------------------------------------


def effective(
    bed: Path, trial: Watched, options: argparse.Namespace, floors: dict[str, float]
) -> dict[str, Any]:
    """Disturb the trial regularly. Return the share of the wall time since the first step that was
    spent on kept steps.

    The second value is this share if only Slurm's floor were lost.
    """
    if not trial.until("the first step", lambda: trial.witness.has_posted(trial.incarnation, 1)):
        raise SystemExit("the trial ended before its first step")
    began, at_best_s = time.monotonic(), options.minutes * 60
    for number in itertools.count():
        due_s = min((number + 1) * options.every_s, options.minutes * 60)
        if not trial.until("the next kill", lambda s=due_s: time.monotonic() >= began + s):
            raise SystemExit(f"the trial ended by itself: {trial.witness.state.end}")
        found = _use(trial, time.monotonic() - began)
        print(f"{due_s / 60:5.1f} min: {found}", flush=True)
        if due_s >= options.minutes * 60:
            break
        cause = options.mixed[number % len(options.mixed)]
        disturb(bed, cause, trial.witness.paths.run, trial.over)
        at_best_s -= floors.get(cause, 0.0)
    at_best = round(at_best_s / (options.minutes * 60), 3)
    return {"causes": options.mixed, "kills": number, **found, "at_best": at_best}


def _use(trial: Watched, wall_s: float) -> dict[str, Any]:
    lines = [line for line in trial.site.metrics(trial.name) if "time/total" in line]
    useful_s = sum(line["time/total"] for line in lines)
    return {
        "steps": len(lines),
        "incarnations": trial.incarnation,
        "useful_s": round(useful_s, 1),
        "wall_s": round(wall_s, 1),
        "ratio": round(useful_s / wall_s, 3),
    }


def stalls(trial: Watched) -> dict[str, int | Spread]:
    """Return the seconds that training waited for commits: median, minimum and maximum."""
    found = [
        event["stall_s"]
        for event in events.read_all(trial.witness.paths)
        if event["kind"] == "commit" and "stall_s" in event
    ]
    if not found:
        return {}
    return {
        "commits": len(found),
        "stall_s": Spread.of(found, 4),
    }


# -- all of it -----------------------------------------------------------------------------------


def start(folder: Path, pause_s: float) -> Watched:
    """Start a trial that commits every second step and runs until it is cancelled."""
    folder.mkdir()
    config = paced.config(folder, pause_s=pause_s)
    config["cluster"] = paced.cluster(folder, partition="low", links=100, time="1-0")
    return Watched(Site(folder), {**config, "total_steps": 1_000_000}, "slurm")


def finish(trial: Watched) -> None:
    trial.site.slurmrl("cancel", trial.name)
    wait_until("an empty queue", lambda: not slurm("squeue", "-h"))


def by_cause(bed: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    trial = start(folder / "causes", options.step_s)
    rows = []
    for cause in [cause for cause in options.causes if cause != "node"]:
        for _ in range(options.repeat):
            rows.append(recovery(bed, trial, cause))
            print(_row(rows[-1]), flush=True)
        print(_spread(cause, rows), flush=True)
    print(f"checkpoint stall: {stalls(trial) or 'not recorded'}", flush=True)
    if "node" in options.causes:
        rows.append(recovery(bed, trial, "node"))
        print(_row(rows[-1]), flush=True)
    finish(trial)
    return rows


def _row(row: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {seconds}" for name, seconds in row["phases"].items())
    return f"{row['cause']:<11} {row['how']:<11} {row['seconds']:7.2f} s: {phases}"


def _spread(cause: str, rows: list[dict[str, Any]]) -> str:
    seconds = Spread.of(row["seconds"] for row in rows if row["cause"] == cause)
    return f"{cause:<11} all         {seconds.text()} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--causes", default=",".join(ALL), help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="of each cause but `node`")
    parser.add_argument("--step-s", type=float, default=0.5, help="least length of a step")
    parser.add_argument("--minutes", type=float, default=3, help="of killing workers; 0: none")
    parser.add_argument("--every-s", type=float, default=60, help="between two of these kills")
    parser.add_argument("--mixed", default="worker", help="causes of these kills, in turn")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    options.causes = [cause for cause in options.causes.split(",") if cause]
    options.mixed = options.mixed.split(",") if options.minutes else []
    if unknown := {*options.causes, *options.mixed} - {*ALL}:
        parser.error(f"unknown causes: {', '.join(sorted(unknown))}; known: {', '.join(ALL)}")
    result: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    print(f"{result['cpus']} CPUs, load {result['load_before']:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options, result)
    result["load_after"] = os.getloadavg()[2]
    print(f"load {result['load_after']:.1f} (15 minutes)")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure(folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.causes:
        with private_bed() as bed:
            result["recovery"] = by_cause(bed, folder, options)
    with private_bed() as bed:
        floors = {c: floor_s(bed, folder, c) for c in ALL if c in options.causes + options.mixed}
    result["floor_s"] = {c: round(s, 2) for c, s in floors.items() if s is not None}
    print(f"Slurm's floor: {result['floor_s']}", flush=True)
    if options.minutes:
        with private_bed() as bed:
            trial = start(folder / "effective", options.step_s)
            found = effective(bed, trial, options, result["floor_s"])
            result["effective"] = found | {"stall": stalls(trial)}
            finish(trial)
        print(f"effective training time: {result['effective']}", flush=True)


if __name__ == "__main__":
    main()
