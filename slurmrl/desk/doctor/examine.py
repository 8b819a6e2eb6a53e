"""All checks of ``slurmrl doctor``."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

from slurmrl.config.schema import Cluster
from slurmrl.desk.doctor import login, servers, software
from slurmrl.desk.doctor.check import Check, failed, guarded
from slurmrl.desk.doctor.job import JobShape, ProbeJob, Say, scratch
from slurmrl.errors import SchedulerError
from slurmrl.plan import resources
from slurmrl.plan.build import make_plan
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.precision import bfloat16_models
from slurmrl.plan.settings import Settings
from slurmrl.scheduler import choose
from slurmrl.scheduler.client import SlurmClient

HOSTS = 2
"""Hosts of the job if the cluster has them: some checks compare two hosts."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned")
SINFO_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Examination:
    """Scope of an examination."""

    config: Path | None
    overrides: tuple[str, ...]
    root: Path | None
    """``--root`` or SLURMRL_ROOT; None leaves it to the configuration."""
    fallback: Path
    """The root if neither sets one."""
    scheduler: str | None
    job: bool
    timeout_s: float
    check_timeout_s: float | None = None
    """For the files of the configuration's trial; None leaves them alone."""


def examine(what: Examination, say: Say) -> list[Check]:
    """Run all checks; ``say`` reports progress."""
    settings: Settings | None = None
    checks: list[Check] = []
    if what.config is not None:
        settings, checks = login.configuration(
            what.config, what.overrides, what.root, what.scheduler
        )
    config = settings.config if settings else None
    cluster = config.cluster if config else Cluster()
    if what.config is None:
        cluster, more = login.site_profile()
        checks += more
    requested = what.scheduler or cluster.scheduler
    kind = choose(requested, asks_slurm=(config or cluster).asks_slurm)
    hosts = resources.ask(settings.config) if settings and kind == "slurm" else None
    plan = make_plan(settings, scheduler=kind, hosts=hosts) if settings else None
    checks += _trial(settings, plan, kind, what.check_timeout_s)
    checks += servers.check_environment(config, sleeps=_servers_sleep(plan)) if config else []
    running_servers = servers.running_settings(config) if config else None
    if running_servers is not None and not what.job:
        checks += servers.check_running(running_servers, elsewhere=kind != "local")
    checks += [*login.scheduler(requested, kind, settings, plan, hosts), *login.machine()]
    narrow = bfloat16_models(config, plan, plan.groups) if config and plan else []
    checks += software.processor(narrow)
    root = Path(config.root) if config else what.root or what.fallback

    def look_at_root() -> list[Check]:
        with scratch(root) as paths:
            beside = login.root(paths.run)
            if not what.job:
                return _here(beside)
            if what.config is not None and settings is None:
                advice = "fix the configuration first: it determines where and as whom the job runs"
                return _here([*beside, failed("job", "was not submitted", advice)])
            shape = _shape(kind, cluster, plan)
            job = ProbeJob(
                paths, kind, cluster, shape, what.timeout_s, say, running_servers, narrow
            )
            return [*_here(beside), *job.run()]

    more = guarded("root", login.ROOT_ADVICE, look_at_root)
    return _here([*checks, *more, *software.same_everywhere(checks, more)])


def _servers_sleep(plan: Plan | None) -> bool:
    return plan is not None and plan.trainers.gpus_per_worker > 0 and ROLLOUTS in plan.offloaded


def _trial(
    settings: Settings | None, plan: Plan | None, kind: str, timeout_s: float | None
) -> list[Check]:
    if settings is None or plan is None or settings.missing or timeout_s is None:
        return []
    return guarded("trial", "", lambda: login.trial(settings, plan, timeout_s, kind))


def _here(checks: list[Check]) -> list[Check]:
    return [one if one.where else one.at(socket.gethostname()) for one in checks]


def _shape(kind: str, cluster: Cluster, plan: Plan | None) -> JobShape:
    """That of the configuration's job, with a second host where there is one."""
    shape = JobShape(hosts=1)
    if plan is not None:
        group = plan.trainers
        shape = JobShape(
            group.hosts,
            group.workers_per_host,
            group.gpus_per_worker,
            group.cpus_per_worker,
            group.mem_per_worker,
        )
    if kind == "local" or shape.hosts >= HOSTS:
        return shape
    try:
        rows = SlurmClient(timeout_s=SINFO_TIMEOUT_S).hosts(cluster.slurm.partition)
    except SchedulerError:
        return shape
    fit = [row for row in rows if row.gpus >= shape.gpus and row.state.strip("*~#$@+-") in USABLE]
    hosts = max(shape.hosts, min(HOSTS, len(fit)))
    return replace(shape, hosts=hosts)
