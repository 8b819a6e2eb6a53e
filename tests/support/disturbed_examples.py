"""Failures of processes of a trial on a Slurm test bed, each during training."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slurmrl.run import events
from tests.support.beds import run_bed
from tests.support.chaos_trials.witness import Witness
from tests.support.held_examples import HeldForms
from tests.support.nodes import kill_node, node_of, slurm
from tests.support.rollout_trials import of_group
from tests.support.servers import servers
from tests.support.trials import alive, parent, processes, wait_until

T = TypeVar("T")
STEPS_EACH = 4
"""Steps for each disturbance, which include a commit."""
TIMEOUT_S = 600.0
"""Time limit of each wait, in which a server may start (a minute of CPU time)."""


@dataclass
class Disturbed:
    """A trial that waits at a step, and the observer of the trial."""

    forms: HeldForms
    name: str
    bed: Path
    witness: Witness = field(init=False)
    folders: set[Path] = field(default_factory=set)
    """Private folders of the servers."""

    def __post_init__(self) -> None:
        folder = self.forms.site.folder / "witness"
        self.witness = Witness(self.forms.site.paths(self.name), folder)

    @property
    def run(self) -> Path:
        return self.witness.paths.run

    @property
    def incarnation(self) -> int:
        return self.witness.state.incarnation

    def step(self) -> int:
        lines = self.forms.site.metrics(self.name)
        return lines[-1]["step"] if lines else 0

    def group(self, role: str, group: str) -> list[int]:
        return of_group(self.forms.site, self.name, role, group)

    def until(self, what: str, check: Callable[[], T | None]) -> T:
        """Wait while the trial runs."""

        def look() -> T | None:
            self.witness.look()
            assert self.witness.state.end is None, f"{self.name} ended before {what}"
            return check()

        return wait_until(f"{what} of {self.name}", look, TIMEOUT_S)

    def disturb(self, kind: str) -> str:
        """Disturb the trial while it trains, and return the observed recovery."""
        before = self.step()
        self.folders |= {one.folder for one in servers(self.run)}
        self.forms.allow(before + STEPS_EACH)
        self.until("a step", lambda: self.step() > before)
        came = KINDS[kind](self)
        self.until("further steps", lambda: self.step() >= before + STEPS_EACH)
        return came

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.until(f"the end of process {pid}", lambda: not alive(pid))

    def begins_again(self, act: Callable[[], object]) -> str:
        """Check that the trainers start again."""
        before = self.incarnation
        act()
        self.until("another incarnation", lambda: self.incarnation > before)
        return f"incarnation {before}, then {self.incarnation}"

    def goes_on(self, what: str, look: Callable[[], set[T]], end: Callable[[T], object]) -> str:
        """End one process of the kind ``what``. Check that another process replaces it and the
        trainers continue.
        """
        before = self.incarnation
        old = self.until(what, look)
        end(max(old))
        new = self.until(f"another {what}", lambda: look() - old)
        assert self.incarnation == before
        return f"{what} {max(old)}, then {min(new)}"

    def process_goes_on(self, role: str) -> str:
        """End a process of a rollout task."""
        return self.goes_on(
            f"{role} of a task", lambda: set(self.group(role, "rollout")), self.kill
        )

    def joined(self) -> set[str]:
        """Return the rollout tasks that have joined."""
        told = events.read_all(self.witness.paths)
        return {one["task"] for one in told if one.get("state") == "joined"}

    def job(self, group: str) -> str:
        """Return a running job."""
        lines = slurm("squeue", "-h", "-r", "-t", "R", "-o", "%i %j").splitlines()
        (job,) = (line.split()[0] for line in lines if line.endswith(f"-{group}"))
        return job


def server(trial: Disturbed) -> str:
    return trial.goes_on("server", lambda: {one.pid for one in servers(trial.run)}, trial.kill)


def keeper(trial: Disturbed) -> str:
    """End the worker that manages the server."""
    pid = trial.until("a server", lambda: servers(trial.run))[0].pid
    for _ in ("its warden", "the worker"):
        pid = parent(Path(f"/proc/{pid}"))
    assert pid in trial.group("worker", "trainer")
    return trial.begins_again(lambda: trial.kill(pid))


def rank(trial: Disturbed) -> str:
    """End the last rank."""
    return trial.begins_again(lambda: trial.kill(trial.group("worker", "trainer")[-1]))


def master(trial: Disturbed) -> str:
    return trial.begins_again(lambda: trial.kill(processes(trial.run)["master"][0]))


def agent(trial: Disturbed) -> str:
    """End the agent of one of the hosts."""
    return trial.begins_again(lambda: trial.kill(trial.group("agent", "trainer")[-1]))


def batch(trial: Disturbed) -> str:
    """End the batch process."""
    return trial.begins_again(lambda: trial.kill(trial.group("supervisor", "trainer")[0]))


def cancelled(trial: Disturbed) -> str:
    """Cancel the job, without the later jobs of the chain."""
    return trial.begins_again(lambda: slurm("scancel", trial.job("trainer")))


def requeued(trial: Disturbed) -> str:
    return trial.begins_again(lambda: slurm("scontrol", "requeue", trial.job("trainer")))


def node(trial: Disturbed) -> str:
    """Kill all processes of a host, as a power failure does."""
    name = node_of(trial.group("agent", "trainer")[-1])
    came = trial.begins_again(lambda: kill_node(trial.bed, trial.run, name))
    run_bed("start", name, "--dir", str(trial.bed))
    return f"{name}: {came}"


def task_worker(trial: Disturbed) -> str:
    return trial.process_goes_on("worker")


def task_agent(trial: Disturbed) -> str:
    return trial.process_goes_on("agent")


def task_batch(trial: Disturbed) -> str:
    """End the batch process of a task in an array."""
    return trial.process_goes_on("supervisor")


def task_cancelled(trial: Disturbed) -> str:
    """Cancel the job of a task in an array."""
    return trial.goes_on("task", trial.joined, lambda _: slurm("scancel", trial.job("rollout")))


KINDS: dict[str, Callable[[Disturbed], str]] = {
    each.__name__: each
    for each in (
        *(server, keeper, rank, master, agent, batch, cancelled, requeued, node),
        *(task_worker, task_agent, task_batch, task_cancelled),
    )
}
