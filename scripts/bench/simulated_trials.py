#!/usr/bin/env python3
"""Compare `slurmrl simulate` with whole trials on a private test bed of Slurm.

scripts/bench/simulated_trials.py [--cases calm,kills,preemptions,lost,unspared,limit,tasks,...]
                                  [--seed N]

Each trial gives the mean seconds of a step, a commit, a start, a restart and a wait for the next
job, which depend on the load of the machine. The rates of the disturbances are chosen, and a trial
with one rollout task gives the speed of a task. From these numbers, `slurmrl simulate` predicts the
wall seconds. The table has the measured seconds, the median and the 80 % interval of the simulated
seconds, and the error of the median.

A trial meets few disturbances, so their number is random. The last columns have the median of the
simulated trials with the same number of disturbances, and its error. Rewards pause, so a step
hardly computes for most of its time, and other programs matter less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slurmrl.run import events
from slurmrl.run.history.slots import Kind
from tests.support import paced, rollout_trials
from tests.support.beds import run_bed
from tests.support.chaos_trials.watched import Watched
from tests.support.nodes import kill_node, node_of, preempt, private_bed, slurm
from tests.support.trials import REPOSITORY, Site, processes, wait_until

CASES = ("calm", "kills", "preemptions", "lost", "unspared", "limit", "tasks", "task-kills")
DAY_S = 86400.0
HOSTS = 2
RUNS = 500
LEASE_S = 20.0
"""Time without a heartbeat after which an agent of the case ``lost`` counts as dead."""
SPARES = {"lost": 1, "unspared": 0}
"""Spare hosts of the cases with lost hosts."""
FIRST = 3
"""First steps of a trial with tasks. They do not count, because tasks had more time for them."""


class Row(NamedTuple):
    """A real trial and its simulations."""

    case: str
    measured: float
    predicted: float
    low: float
    high: float
    equal: list[float]
    """Seconds of the simulated trials with the same number of disturbances."""
    notes: str

    def text(self) -> str:
        words = (
            f"{self.case:<12} {self.measured:9.1f} {self._beside(self.predicted)} "
            f"{self.low:7.1f} to {self.high:<7.1f} "
        )
        as_many = f"{len(self.equal):4} runs"
        if self.equal:
            as_many += f" {self._beside(statistics.median(self.equal))}"
        return f"{words} {as_many:<29} {self.notes}"

    def _beside(self, predicted: float) -> str:
        return f"{predicted:10.1f} {predicted / self.measured - 1:+7.1%}"


class Running(NamedTuple):
    """A trial and the time at which its jobs were queued."""

    trial: Watched
    queued_at: float


def submitted(
    folder: Path, steps: int, pause_s: float, commits: int, **slurm_options: Any
) -> Running:
    """Submit PPO on two nodes, whose reward takes ``pause_s``."""
    folder.mkdir()
    config = paced.config(folder, pause_s=pause_s)
    options = {"partition": "low", "links": 30, "time": "1-0", **setup(folder), **slurm_options}
    config["cluster"] = paced.cluster(folder, **options)
    config["cluster"]["lease_ttl_s"] = LEASE_S
    config |= {"total_steps": steps, "checkpoint": {"every_steps": commits}}
    config["max_restarts_without_commit"] = 100
    trial = Watched(Site(folder), config, "slurm")
    return Running(trial, time.time())


def setup(folder: Path) -> dict[str, Any]:
    """Let the jobs find the reward in a folder, and the code of this repository."""
    return {"setup": [f"export PYTHONPATH={folder}:{REPOSITORY}"]}


def wall_s(running: Running) -> float:
    """Seconds from the submission to the end of a trial, which must have finished."""
    (end,) = [one for one in running.trial.witness.records if one.kind.is_end]
    assert end.kind is Kind.FINISHED, f"the trial ended as {end}"
    return end.time - running.queued_at


def to_the_end(running: Running, rate: float, act: Callable[[], object], seed: int) -> int:
    """Disturb a trial at random times, ``rate`` times a second, until its end. Return the count."""
    rng, count = random.Random(seed), 0
    trial = running.trial
    while True:
        wait = rng.expovariate(rate) if rate else float("inf")
        due = time.monotonic() + wait
        if not trial.until("the next one", lambda at=due: time.monotonic() >= at, 3600.0):
            return count
        act()
        count += 1


class Kills(NamedTuple):
    """Kills one worker of the trainers at each call, and records the time."""

    running: Running
    times: list[float]

    def __call__(self) -> None:
        trial = self.running.trial

        def killed() -> bool:
            of_tasks = rollout_trials.of_group(trial.site, trial.name, "worker", "rollout")
            found = set(processes(trial.witness.paths.run)["worker"]).difference(of_tasks)
            with suppress(ProcessLookupError):
                for pid in sorted(found)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    self.times.append(time.time())
                    return True
            return trial.over()

        wait_until("a worker of the trainers", killed)


@dataclass
class Losses:
    """Makes a random node of the trial's job fail at each call, and repairs it later."""

    running: Running
    bed: Path
    rng: random.Random
    times: list[float] = field(default_factory=list)
    repairs: list[threading.Thread] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    """Nodes that have failed and are not repaired yet."""

    def __call__(self) -> None:
        shown = slurm("squeue", "-h", "-t", "R", "-o", "%N")
        held = slurm("scontrol", "show", "hostnames", shown).split() if shown else []
        names = sorted({*held} - self.down)
        if not names:
            return  # the trial waits in the queue
        name, run = self.rng.choice(names), self.running.trial.witness.paths.run
        used = {node_of(pid) for pid in processes(run)["agent"]} or names
        self.down.add(name)
        kill_node(self.bed, run, name)
        if name in used:  # Other hosts are spares.
            self.times.append(time.time())
        self.repairs.append(threading.Thread(target=self._repair, args=(name,)))
        self.repairs[-1].start()

    def _repair(self, name: str) -> None:
        down = f"node {name} to be down"
        wait_until(down, lambda: "down" in slurm("sinfo", "-h", "-n", name, "-o", "%t"))
        run_bed("start", name, "--dir", str(self.bed))
        self.down.discard(name)


def seen(trial: Watched, kind: str, writer: str) -> list[float]:
    """Times of the events of a kind by a kind of writer."""
    return sorted(
        float(event["time"])
        for event in events.read_all(trial.witness.paths)
        if event["kind"] == kind and str(event["writer"]).startswith(writer)
    )


class Parts(NamedTuple):
    """Mean seconds of the parts of a trial."""

    step: float
    commit: float
    first_wait: float
    start: float
    """Seconds from the start of a job to its first step, over jobs that made a step."""
    restart: float | None
    """Seconds from a kill to the next step, without another kill in between; None without a
    kill."""
    wait: float | None
    """Seconds from the end of a job to the start of the next job; None with one job."""

    def options(self) -> list[str]:
        found = {
            "step-seconds": self.step,
            "commit-seconds": self.commit,
            "start-seconds": self.start,
            "restart-seconds": self.start if self.restart is None else self.restart,
        }
        waits = [f"--first-wait={self.first_wait}s", f"--queue-wait=fixed:{self.wait or 0}s"]
        return [*(f"--{name}={value}" for name, value in found.items()), *waits]

    def text(self) -> str:
        return ", ".join(
            f"{name} {value:.2f} s" for name, value in self._asdict().items() if value is not None
        )


def parts_of(running: Running, kills: list[float]) -> Parts:
    """Measure the parts of a trial that has ended, whose workers were killed at ``kills``."""
    trial, mean = running.trial, statistics.mean
    starts = seen(trial, "start", "supervisor.trainer.")
    ready = seen(trial, "ready", "master.")
    ends = seen(trial, "end", "supervisor.trainer.")
    warned = seen(trial, "warned", "agent.trainer.")
    commits = [one.time for one in trial.witness.records if one.kind is Kind.COMMIT]

    def to_ready(times: list[float]) -> list[float]:
        """Return the seconds from each time to the next step, unless another time comes first."""
        spans = pairwise([*times, math.inf])
        first = (
            (one, next((at for at in ready if one < at < other), None)) for one, other in spans
        )
        return [at - one for one, at in first if at is not None]

    def ended(start: float, following: float) -> float | None:
        """Return the end of a job: its commit after a warning, or else the supervisor's end."""
        told = next((at for at in warned if start < at < following), math.inf)
        last = [at for at in commits if told < at < following]
        last = last or [at for at in ends if start < at < following]
        return max(last, default=None)

    lines = trial.site.metrics(trial.name)
    steps = [
        line["time/total"] - line.get("rollout/waited_s", 0.0)
        for line in lines
        if "time/total" in line
    ]
    stalls = [line["time/checkpoint_stall"] for line in lines if "time/checkpoint_stall" in line]
    restarts = to_ready(kills)
    waits = [
        following - at
        for start, following in pairwise(starts)
        if (at := ended(start, following)) is not None
    ]
    return Parts(
        mean(steps),
        mean(stalls),
        starts[0] - running.queued_at,
        mean(to_ready(starts)),
        mean(restarts) if restarts else None,
        mean(waits) if waits else None,
    )


def simulated(config: Path, site: Site, options: list[str]) -> list[dict[str, Any]]:
    """Return simulated trials with a configuration, the shortest first."""
    done = site.slurmrl("simulate", str(config), "--json", f"--runs={RUNS}", *options, code=None)
    found = json.loads(done.stdout)
    runs = found["time_limits"][0]["runs"]
    ended = [one["why"] for one in runs if not one["finished"]]
    if ended:
        print(f"simulated trials that did not finish: {len(ended)}, such as: {ended[0]}")
    return sorted(runs, key=lambda one: float(one["seconds"]))


def compared(
    case: str, running: Running, options: list[str], notes: str, met: tuple[str, int] | None
) -> Row:
    """Compare with simulated trials; ``met``: the kind and number of the real disturbances."""
    trial = running.trial
    runs = simulated(trial.site.folder / "config.yaml", trial.site, options)
    values = [float(one["seconds"]) for one in runs]
    low, high = (values[round(share * (len(values) - 1))] for share in (0.1, 0.9))
    as_many = [
        float(one["seconds"]) for one in runs if met and one["events"].get(met[0], 0) == met[1]
    ]
    row = Row(case, wall_s(running), statistics.median(values), low, high, as_many, notes)
    print(row.text(), flush=True)
    return row


def trainers_case(case: str, folder: Path, given: argparse.Namespace) -> Row:
    """Run a trial without rollout tasks, and simulate it."""
    options, rate, kills, kind = list[str](), 0.0, list[float](), ""
    limits: dict[str, Any] = {}
    if case == "limit":
        limits = {"partition": "main", "time": "3", "signal_lead_s": 60}
    elif case in SPARES:
        spares = SPARES[case]
        limits = {"partition": "main", "spares": spares, "extra_lines": ["--exclusive"]}
    running = submitted(folder, given.steps, given.pause_s, given.commit_steps, **limits)
    act: Callable[[], object] = preempt
    losses = Losses(running, given.bed, random.Random(f"{given.seed} nodes"))
    if case == "kills":
        rate, act, kind = 1 / given.kill_every_s, Kills(running, kills), "crashes"
        options = [f"--crashes={rate / HOSTS * DAY_S}"]
    elif case == "preemptions":
        rate, kind = 1 / given.preempt_every_s, "preemptions"
        options = [f"--preemptions={rate * DAY_S}", "--grace-seconds=6"]
    elif case in SPARES:
        rate, act, kind = 1 / given.lose_every_s, losses, "lost hosts"
        each = rate / (HOSTS + SPARES[case])
        options = [f"--failures={each * DAY_S}", "--slurmd-timeout=5"]
    count = to_the_end(running, rate, act, given.seed)
    for repair in losses.repairs:
        repair.join()
    parts = parts_of(running, kills)
    print(f"{case}: {parts.text()}", flush=True)
    jobs = len(seen(running.trial, "start", "supervisor.trainer."))
    count = len(losses.times) if case in SPARES else count
    count = jobs - 1 if case == "preemptions" else count
    notes = f"{count} {kind}, {jobs} jobs" if rate else f"{jobs} jobs"
    met = (kind, count) if kind else None
    return compared(case, running, [*parts.options(), *options], notes, met)


def with_tasks(folder: Path, tasks: int, given: argparse.Namespace, steps: int) -> Running:
    """Submit GRPO with ``tasks`` rollout tasks in separate jobs."""
    folder.mkdir()
    site = rollout_trials.site_in(folder, {}, given.task_pause_s)
    config = rollout_trials.config_of("1", {"max": tasks})
    config |= {"total_steps": steps, "checkpoint": {"every_steps": 5}}
    config["max_restarts_without_commit"] = 100
    config["cluster"] = {
        "workers_per_host": 2,
        "gpus_per_worker": 0,
        "interface": "lo",
        "slurm": {"partition": "main", "time": "60", **setup(folder)},
    }
    return Running(Watched(site, config, "slurm"), time.time())


def tasks_case(case: str, folder: Path, given: argparse.Namespace) -> Row:
    """Run trials with one and with more rollout tasks; simulate the second one."""
    folder.mkdir()
    slow = with_tasks(folder / "one", 1, given, given.task_steps // 2)
    to_the_end(slow, 0.0, lambda: None, given.seed)
    per_hour = groups_per_hour(slow)
    parts = parts_of(slow, [])
    print(f"{case}: one task makes {per_hour:.0f} groups an hour; {parts.text()}", flush=True)
    running = with_tasks(folder / "more", given.tasks, given, given.task_steps)
    kills, rate = list[float](), 1 / given.kill_every_s if case == "task-kills" else 0.0
    count = to_the_end(running, rate, Kills(running, kills), given.seed)
    parts = parts_of(running, kills)
    print(f"{case}: {given.tasks} tasks; {parts.text()}", flush=True)
    options = [*parts.options(), f"--groups-per-hour={per_hour}", f"--crashes={rate * DAY_S}"]
    met = ("crashes", count) if rate else None
    return compared(case, running, options, f"{given.tasks} tasks, {count} kills", met)


def groups_per_hour(running: Running) -> float:
    """Groups of a trial with one task, after its first steps."""
    lines = running.trial.site.metrics(running.trial.name)[FIRST:]
    took = lines[-1]["time"] - lines[0]["time"]
    return 3600 * rollout_trials.BATCH * (len(lines) - 1) / took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause-s", type=float, default=0.5, help="of a reward")
    parser.add_argument("--task-pause-s", type=float, default=0.5, help="of a task's reward")
    parser.add_argument("--task-steps", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--preempt-every-s", type=float, default=60.0)
    parser.add_argument("--lose-every-s", type=float, default=120.0)
    parser.add_argument("--commit-steps", type=int, default=5, help="between two commits")
    given = parser.parse_args()
    given.cases = given.cases.split(",")
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; allowed: {', '.join(CASES)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as name, private_bed() as given.bed:
        for case in given.cases:
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", flush=True)
            make = tasks_case if case.startswith("task") else trainers_case
            rows.append(make(case, Path(name) / case, given))
    print(
        f"\nCASE          MEASURED  PREDICTED   ERROR  80 % OF {RUNS} SIMULATED TRIALS, "
        "AND THOSE WITH AS MANY DISTURBANCES"
    )
    for row in rows:
        print(row.text())


if __name__ == "__main__":
    main()
