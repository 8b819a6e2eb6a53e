"""``slurmrl profile-cluster``: a short job that measures the hardware, and the profile from it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from slurmrl.config import profiles
from slurmrl.config.load import load_profile
from slurmrl.config.schema import Cluster
from slurmrl.desk.doctor.examine import SINFO_TIMEOUT_S, USABLE
from slurmrl.desk.doctor.job import Say, ShortJob, scratch
from slurmrl.desk.measured_profile import profile_text
from slurmrl.desk.trial_jobs import clear_away
from slurmrl.errors import EnvironmentFailure, SchedulerError, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.plan.estimates import hardware
from slurmrl.plan.estimates.hardware import CPU
from slurmrl.plan.resolve.inherited_settings import gpus_per_worker
from slurmrl.plan.settings import load_settings
from slurmrl.scheduler import choose
from slurmrl.scheduler.base import GroupRequest
from slurmrl.scheduler.client import SlurmClient
from slurmrl.workers import hardware_job
from slurmrl.workers.hardware_sizes import ON_CPUS, ON_GPUS, MeasureSizes

GROUP: Final = "profile"
RANKS: Final = 2
"""Ranks of a host whose GPUs and workers are unknown."""


@dataclass(frozen=True)
class Profiling:
    """Scope of a measurement."""

    config: Path | None
    overrides: tuple[str, ...]
    root: Path | None
    fallback: Path
    """The root if no option, variable or profile sets one."""
    scheduler: str | None
    hosts: int | None
    ranks: int | None
    """Ranks of each host."""
    name: str | None
    """Name of the hardware."""
    output: Path | None
    timeout_s: float
    sizes: MeasureSizes | None = None
    """Sizes of the measurements; None means the default for CPUs or GPUs."""


@dataclass
class ProfileJob(ShortJob):
    """The job that measures; its results are the points of all ranks."""

    program: ClassVar = "slurmrl.workers.hardware_job"
    minutes: ClassVar = "20"
    runs_s: ClassVar = hardware_job.LIMIT_S + 60
    srun_options: ClassVar = ("--kill-on-bad-exit=1",)

    sizes: MeasureSizes = ON_CPUS

    def write(self) -> None:
        """Write the package and the request."""
        super().write()
        request = {
            "ranks_per_host": self.group.workers_per_host,
            "hosts": self.group.hosts,
            "gpus": self.group.gpus_per_worker,
            "threads": self.cluster.threads_per_worker,
            "interface": self.cluster.interface,
            "slurm": self.cluster.slurm.model_dump(include={"container", "container_python"}),
            "sizes": asdict(self.sizes),
        }
        atomic.replace(self.folder / hardware_job.ASK, json.dumps(request).encode())

    def points(self) -> tuple[list[str], list[list[dict[str, Any]]]]:
        """Run the job; return its hosts and the points of each rank.

        Raises EnvironmentFailure for a job that does not measure, SchedulerError.
        """
        jobs, ended = self.ended()
        try:
            answers = self.answers()
        finally:
            clear_away(jobs)
        failures = [found for _, found in sorted(answers.items()) if "error" in found]
        if failures:
            first = min(failures, key=lambda found: bool(found.get("echo")))
            raise EnvironmentFailure(f"host {first['host']}: {first['error']}\n{first['log']}")
        missing = sorted(set(range(self.group.hosts)) - set(answers))
        if missing:
            last = self.log()
            said = f"; its output ends with: {last}" if last else ""
            raise EnvironmentFailure(
                f"no result from host {', '.join(map(str, missing))} of {self.group.hosts}: "
                f"{ended}{said}"
            )
        hosts, ranks = [], []
        for task, found in sorted(answers.items()):
            with documents.expecting(self.folder / hardware_job.result_name(task)):
                hosts.append(str(found["host"]))
                ranks += [list(one["points"]) for one in found["ranks"]]
        return hosts, ranks


def profile(what: Profiling, say: Say) -> Path:
    """Measure the hardware and write its profile, whose path is returned.

    Raises UsageError, EnvironmentFailure, SchedulerError. Without a result, nothing is written.
    """
    cluster, root = _cluster(what)
    kind = choose(what.scheduler or cluster.scheduler, asks_slurm=cluster.asks_slurm)
    group = _group(what, cluster, kind)
    gpus = group.gpus_per_worker
    name = what.name or _name(cluster, gpus)
    if name is not None:
        _output(what, name)  # reject an invalid name or folder before the job
    if name is not None and (name == CPU) == bool(gpus):
        seen = "GPUs" if gpus else "no GPUs"
        raise UsageError(f"--name {name}: the ranks have {seen}; '{CPU}' is the name without GPUs")
    sizes = what.sizes or (ON_GPUS if gpus else ON_CPUS)
    count = f"{group.hosts} host{'s' * (group.hosts > 1)}"
    each = f"{group.workers_per_host} rank{'s' * (group.workers_per_host > 1)} each"
    say(f"a job of {count} with {each} on {kind} measures the hardware, which takes minutes")
    with scratch(root) as paths:
        job = ProfileJob(paths, kind, cluster, group, what.timeout_s, say, sizes)
        hosts, ranks = job.points()
    name = name or _seen(ranks)
    made = (
        f"measured by slurmrl profile-cluster on {datetime.now(UTC):%Y-%m-%d} on "
        f"{', '.join(hosts)} with {each}"
    )
    text = profile_text(name, made, ranks, sizes.model)
    path = _output(what, name)
    atomic.make_private_directory(path.parent)
    atomic.replace(path, text.encode())
    return path


def _cluster(what: Profiling) -> tuple[Cluster, Path]:
    """The settings of the cluster, and the folder of all runs."""
    if what.config is not None:
        settings = load_settings(
            what.config, what.overrides, root=what.root, scheduler=what.scheduler, planning=True
        )
        return settings.config.cluster, Path(settings.config.root)
    path = profiles.in_force()
    cluster = Cluster() if path is None else load_profile(path).cluster
    return cluster, what.root or what.fallback


def _group(what: Profiling, cluster: Cluster, kind: str) -> GroupRequest:
    """The hosts and ranks of the job: two hosts if the cluster has them, one rank for each GPU."""
    rows = []
    if kind != "local":
        try:
            found = SlurmClient(timeout_s=SINFO_TIMEOUT_S).hosts(cluster.slurm.partition)
            rows = [row for row in found if row.state.strip("*~#$@+-") in USABLE]
        except SchedulerError:
            rows = []
    on_gpus = gpus_per_worker(cluster, kind)
    most = max((row.gpus for row in rows), default=0) if on_gpus else 0
    ranks = what.ranks or cluster.workers_per_host or most or RANKS
    fit = [row for row in rows if row.gpus >= ranks * on_gpus]
    hosts = what.hosts or min(2, max(len(fit), 1))
    if kind == "local" and hosts > 1:
        raise UsageError("--hosts: the local scheduler has one host")
    if ranks * hosts == 1:
        raise UsageError("--ranks: collectives need at least two ranks")
    cores = cluster.cpus_per_worker or cluster.threads_per_worker
    group = GroupRequest(name=GROUP, hosts=hosts, workers_per_host=ranks, gpus_per_worker=on_gpus)
    return replace(group, cpus_per_worker=cores, mem_per_worker=cluster.mem_per_worker)


def _name(cluster: Cluster, gpus: int) -> str | None:
    """The name of the hardware, by which plan finds it; None if only the job can tell."""
    if not gpus:
        return CPU
    known = hardware.name_of(cluster.model_copy(update={"gpus_per_worker": 1}))
    return known or hardware.new_name(cluster.slurm.gpu_type or "")


def _seen(ranks: list[list[dict[str, Any]]]) -> str:
    """The name of the GPU that the ranks have."""
    full = next(point["name"] for points in ranks for point in points if point["what"] == "device")
    found = hardware.new_name(str(full))
    assert found is not None, "a GPU has a name"
    return found


def _output(what: Profiling, name: str) -> Path:
    path = what.output or hardware.own_folder() / f"{name}.yaml"
    if path.is_dir():
        raise UsageError(f"--output {path}: is a directory, not a file")
    if what.output is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,63}", name):
        raise UsageError(
            f"--name {name}: a name has 1 to 64 lower-case letters, digits, '.' or '-'"
        )
    return path
