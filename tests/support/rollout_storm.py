"""Seeded disturbances of a trial whose rollout tasks run in a preemptible partition of Slurm.

A seed selects several kinds. Each disturbance follows after some steps and lasts until the trial
reacts, so results do not depend on the speed of the machine.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmrl.run import events
from tests.support.beds import run_bed
from tests.support.chaos_trials.watched import Watched
from tests.support.nodes import kill_node, on_node, slurm, wait_for_empty_queue
from tests.support.rollout_checker import Checker
from tests.support.rollout_evidence import Archive
from tests.support.rollout_trials import BATCH, config_of, site_in
from tests.support.trials import processes, wait_until

KINDS_AT_A_TIME = 3
STEPS_BETWEEN = 3
STEPS = 2 + KINDS_AT_A_TIME * (STEPS_BETWEEN + 2) + 3
DISK = "256m"
OUTAGE_LOOKS = 30
"""Number of reads of a read-only directory before it becomes writable again."""


def weather(folder: Path, bed: Path, seed: int) -> tuple[list[str], list[str]]:
    """Run the trial ``grpo/<seed>`` with the disturbances of a seed, on a separate disk below
    ``folder``. Return the disturbances and the checker's findings. Raises AssertionError if the
    trial does not complete by itself.
    """
    chance = random.Random(f"slurmrl rollouts {seed}")
    kinds = drawn(seed)
    staleness = chance.choice([0, 1, 2])
    with small_disk(folder / "disk") as disk:
        config = _config(seed, staleness)
        site = site_in(disk, {"SLURM_CONF": str(bed / "slurm.conf")})
        trial = Watched(site, config, "slurm")
        storm = Storm(trial, bed, disk, chance)
        run = trial.witness.paths.run
        with Archive(run, disk / "archive"):
            for kind in kinds:
                if not storm.wait_for_steps(STEPS_BETWEEN):
                    break
                storm.met.append(kind)
                KINDS[kind](storm)
            trial.until("the end", lambda: False)
            status = site.wait_for_end(trial.name)
        assert (status["state"], status["step"]) == ("COMPLETED", STEPS), status
        wait_for_empty_queue()
        checker = Checker(run, disk / "archive", BATCH, staleness)
        return storm.met, checker.problems()


def drawn(seed: int) -> list[str]:
    """Return the kinds of a seed. Consecutive seeds cover all kinds first."""
    first = KINDS_AT_A_TIME * (seed - 1)
    places = [divmod(place, len(KINDS)) for place in range(first, first + KINDS_AT_A_TIME)]
    return [random.Random(deck).sample(sorted(KINDS), len(KINDS))[card] for deck, card in places]


def _config(seed: int, staleness: int) -> dict[str, Any]:
    config = config_of(str(seed), {"max": 2, "max_staleness": staleness})
    alone = ["--exclusive"]
    trainers = {"partition": "main", "time": "30", "links": 12, "extra_lines": alone}
    return {
        **config,
        "total_steps": STEPS,
        "max_restarts_without_commit": 8,
        "step_timeout_s": 60,
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "rollout": {**config["rollout"], "slurm": {"partition": "low", "extra_lines": alone}},
        "cluster": {
            "workers_per_host": 2,
            "gpus_per_worker": 0,
            "interface": "lo",
            "heartbeat_s": 1,
            "lease_ttl_s": 8,
            "silence_s": 20,
            "slurm": trainers,
        },
    }


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a separate file system, which needs root."""
    folder.mkdir(parents=True)
    options = f"size={DISK},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class Storm:
    """A running trial and its possible disturbances."""

    trial: Watched
    bed: Path
    disk: Path
    chance: random.Random
    met: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.trial.witness.paths.run

    def wait_for_steps(self, count: int) -> bool:
        """Wait until this many more batches were posted. Return False if the trial has ended."""
        wanted = self._batches() + count
        return self.trial.until(f"{count} steps", lambda: self._batches() >= wanted)

    def _batches(self) -> int:
        return sum(map(len, self.trial.witness.posted.values()))

    def until(self, what: str, check: Callable[[], Any]) -> None:
        self.trial.until(what, lambda: bool(check()))

    def jobs(self, group: str) -> dict[str, str]:
        """Return the nodes of a group's running jobs."""
        lines = slurm("squeue", "-h", "-r", "-t", "R", "-o", "%i %j %N").splitlines()
        found = [line.split() for line in lines]
        return {job: node for job, name, node in found if name.endswith(f"-{group}")}

    def some_job(self, group: str) -> tuple[str, str]:
        """Return a running job of a group with a process on its node, and the node."""
        found: list[tuple[str, str]] = []

        def look() -> bool:
            found[:] = [one for one in self.jobs(group).items() if self.of("agent", one[1])]
            return bool(found)

        self.until(f"a {group} job", look)
        return self.chance.choice(sorted(found)) if found else ("", "")

    def of(self, role: str, node: str) -> list[int]:
        """Return the processes of a role on a node."""
        return sorted(set(processes(self.run)[role]) & set(on_node(self.run, node)))

    def kill(self, role: str, *nodes: str) -> None:
        for node in nodes:
            for pid in self.of(role, node):
                _signal(pid, signal.SIGKILL)

    def lost(self) -> int:
        """Return the number of attempts that have exited or that masters have declared lost."""
        told = events.read_all(self.trial.witness.paths)
        states = [one["state"] for one in told if one["kind"] == "rollout_task"]
        return len(states) - states.count("joined")

    def outage(self) -> None:
        """Wait for some reads of the directory, without waiting for progress."""
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            return looks > OUTAGE_LOOKS or not os.listdir(self.run)

        wait_until("the end of an outage", look)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# -- rollout tasks -------------------------------------------------------------------------------


def task_worker_killed(storm: Storm) -> None:
    storm.kill("worker", storm.some_job("rollout")[1])


def task_agent_killed(storm: Storm) -> None:
    storm.kill("agent", storm.some_job("rollout")[1])


def all_tasks_killed(storm: Storm) -> None:
    storm.kill("agent", *storm.jobs("rollout").values())


def task_stopped(storm: Storm) -> None:
    """Suspend the task for longer than its lease is valid."""
    _, node = storm.some_job("rollout")
    stopped, before = list(on_node(storm.run, node)), storm.lost()
    for pid in stopped:
        _signal(pid, signal.SIGSTOP)
    storm.until("the loss of a stopped task", lambda: storm.lost() > before)
    for pid in stopped:
        _signal(pid, signal.SIGCONT)


def task_cancelled(storm: Storm) -> None:
    subprocess.run(["scancel", storm.some_job("rollout")[0]], check=False)


def task_requeued(storm: Storm) -> None:
    subprocess.run(["scontrol", "requeue", storm.some_job("rollout")[0]], check=False)


def task_preempted(storm: Storm) -> None:
    _preempt(storm.some_job("rollout")[1])


def task_powered_off(storm: Storm) -> None:
    _, node = storm.some_job("rollout")
    before = storm.lost()
    kill_node(storm.bed, storm.run, node)
    storm.until("the loss of a task", lambda: storm.lost() > before)
    run_bed("start", node, "--dir", str(storm.bed))


def node_drained(storm: Storm) -> None:
    job, node = storm.some_job("rollout")
    slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=storm")
    subprocess.run(["scancel", job], check=False)
    storm.wait_for_steps(2)
    slurm("scontrol", "update", f"nodename={node}", "state=resume")


def array_throttled(storm: Storm) -> None:
    """Limit the array to one running task for two steps."""
    job, _ = storm.some_job("rollout")
    array = job.partition("_")[0]
    _throttle(array, 1)
    subprocess.run(["scancel", job], check=False)
    storm.wait_for_steps(2)
    with suppress(AssertionError):  # the array may have ended with the trial
        _throttle(array, 2)


def _throttle(array: str, tasks: int) -> None:
    command = ["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={tasks}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # scontrol also fails if only ended elements reject the update.
    assert done.returncode == 0 or ": No error" in done.stderr, f"{command}: {done.stderr}"


# -- trainers ------------------------------------------------------------------------------------


def link_cancelled(storm: Storm) -> None:
    subprocess.run(["scancel", storm.some_job("trainer")[0]], check=False)


def trainers_preempted(storm: Storm) -> None:
    _preempt(storm.some_job("trainer")[1])


def trainers_powered_off(storm: Storm) -> None:
    _, node = storm.some_job("trainer")
    before = storm.trial.incarnation
    kill_node(storm.bed, storm.run, node)
    storm.until("the next incarnation", lambda: storm.trial.incarnation > before)
    run_bed("start", node, "--dir", str(storm.bed))


def rank_killed(storm: Storm) -> None:
    for pid in storm.of("worker", storm.some_job("trainer")[1])[:1]:
        _signal(pid, signal.SIGKILL)


def master_killed(storm: Storm) -> None:
    storm.kill("master", storm.some_job("trainer")[1])


def master_and_tasks_killed(storm: Storm) -> None:
    nodes = storm.jobs("rollout").values()
    storm.kill("agent", *nodes)
    master_killed(storm)


def _preempt(node: str) -> None:
    """Submit a job of a higher tier that takes a node for a moment."""
    slurm("sbatch", "-p", "high", "-w", node, "--exclusive", "-t1", "-o/dev/null", "--wrap", "true")


# -- files ---------------------------------------------------------------------------------------


def disk_full(storm: Storm) -> None:
    ballast = storm.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    storm.outage()
    ballast.unlink()


def directory_read_only(storm: Storm) -> None:
    """Make a directory read-only: existing files can still be written."""
    names = ("checkpoints", "control", "history", "rollouts", "versions")
    folders = [storm.run / name for name in names]
    folders += (storm.run / "rollouts").glob("*/samples")
    try:
        _change(folders, "+i")
        storm.outage()
    finally:
        _change(folders, "-i")


def _change(folders: list[Path], what: str) -> None:
    subprocess.run(["chattr", what, *map(str, folders)], check=True)


def version_cut(storm: Storm) -> None:
    for part in sorted(_newest_version(storm).glob("part-*.bin")):
        _cut(part)


def version_removed(storm: Storm) -> None:
    shutil.rmtree(_newest_version(storm), ignore_errors=True)


def _newest_version(storm: Storm) -> Path:
    found = [one.parent for one in (storm.run / "versions").glob("*/manifest.json")]
    return max(found, key=lambda one: [int(part) for part in one.name.split(".")][::-1])


def samples_cut(storm: Storm) -> None:
    for file in sorted(storm.run.glob("rollouts/*/samples/*.samples")):
        _cut(file)


def samples_removed(storm: Storm) -> None:
    for file in storm.run.glob("rollouts/*/samples/*.samples"):
        file.unlink(missing_ok=True)


def _cut(file: Path) -> None:
    """Replace a file by its first half. The archive's copy stays complete."""
    with suppress(FileNotFoundError):
        data = file.read_bytes()
        half = file.with_name(f"{file.name}.half")
        half.write_bytes(data[: len(data) // 2])
        half.replace(file)


KINDS: dict[str, Callable[[Storm], None]] = {
    each.__name__.replace("_", " "): each
    for each in (
        *(task_worker_killed, task_agent_killed, all_tasks_killed, task_stopped, task_cancelled),
        *(task_requeued, task_preempted, task_powered_off, node_drained, array_throttled),
        *(link_cancelled, trainers_preempted, trainers_powered_off, rank_killed, master_killed),
        *(master_and_tasks_killed, disk_full, directory_read_only, version_cut, version_removed),
        *(samples_cut, samples_removed),
    )
}
"""The possible disturbances, by name."""
