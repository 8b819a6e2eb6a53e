"""All checks of ``slurmrl doctor``, and the checks of the machine that submits jobs."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurmrl.config import profiles
from slurmrl.config.load import load_profile
from slurmrl.config.schema import Cluster
from slurmrl.desk import trial_code
from slurmrl.desk.doctor import (
    Check,
    State,
    directory,
    failed,
    guarded,
    machine,
    ok,
    server_checks,
    warning,
)
from slurmrl.desk.doctor.job import GROUP, ProbeJob, Say, gpus_of, scratch
from slurmrl.desk.proposal import Proposal, begun_configuration, run_paths
from slurmrl.desk.provenance import ProvenanceWriter
from slurmrl.desk.trial_checks import Code, Finding, Weight, check_trial, described, job_variables
from slurmrl.errors import ConfigError, SchedulerError, UnreadableInputError
from slurmrl.plan import build
from slurmrl.plan.build import Hosts, make_plan
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.precision import bfloat16_models
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.scheduler import AUTO, choose
from slurmrl.scheduler.base import GroupRequest
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow

HOSTS = 2
"""Number of hosts of the job if the cluster has them, because some checks compare two hosts."""
USABLE = ("idle", "mixed", "allocated", "completing", "planned")
SINFO_TIMEOUT_S = 20.0
ROOT_ADVICE = "choose your own folder on a file system that all hosts share: --root or SLURMRL_ROOT"


@dataclass(frozen=True)
class Examination:
    """Scope of an examination."""

    config: Path | None
    overrides: tuple[str, ...]
    root: Path | None
    """``--root`` or SLURMRL_ROOT; with None, the configuration decides."""
    fallback: Path
    """The root if no option, variable or configuration sets a root."""
    scheduler: str | None
    job: bool
    """Whether to run checks in a short job too."""
    timeout_s: float
    """Maximum seconds until the job starts."""
    check_timeout_s: float | None = None
    """Maximum seconds to check the files of the trial; None skips these checks."""


def examine(what: Examination, say: Say) -> list[Check]:
    """Run all checks and return them; ``say`` reports the progress of the job."""
    settings: Settings | None = None
    checks: list[Check] = []
    if what.config is not None:
        settings, checks = check_configuration(
            what.config, what.overrides, what.root, what.scheduler
        )
    config = settings.config if settings else None
    cluster = config.cluster if config else Cluster()
    if what.config is None:
        cluster, more = check_site_profile()
        checks += more
    requested = what.scheduler or cluster.scheduler
    kind = choose(requested, asks_slurm=(config or cluster).asks_slurm)
    hosts = build.ask_hosts(settings.config) if settings and kind == "slurm" else None
    plan = make_plan(settings, scheduler=kind, hosts=hosts) if settings else None
    limit_s = what.check_timeout_s
    if settings is not None and plan is not None and not settings.missing and limit_s is not None:
        checks += guarded("trial", "", partial(check_trial_files, settings, plan, limit_s, kind))
    if config is not None:
        offloaded = plan.offloaded if plan and plan.trainers.gpus_per_worker > 0 else ()
        sleeps, data = ROLLOUTS in offloaded, config.datasets().values()
        images = any(each.media_keys for each in data)
        checks += server_checks.check_environment(config, sleeps=sleeps, images=images)
    running_servers = server_checks.running_settings(config) if config else None
    if running_servers is not None and not what.job:
        checks += server_checks.check_running(running_servers, elsewhere=kind != "local")
    checks += [
        *check_scheduler(requested, kind, settings, plan, hosts),
        *machine.process_limits(),
        machine.python(),
        *machine.packages(gpus=False),
        machine.optional_packages(),
        machine.operators(job_variables(cluster)),
    ]
    narrow = bfloat16_models(config, plan, plan.groups) if config and plan else []
    checks += machine.processor(narrow)
    root = Path(config.root) if config else what.root or what.fallback

    def check_runs() -> list[Check]:
        with scratch(root) as paths:
            beside = check_root(paths.run)
            if not what.job:
                return _here(beside)
            if what.config is not None and settings is None:
                advice = "fix the configuration first: it determines where and as whom the job runs"
                return _here([*beside, failed("job", "was not submitted", advice)])
            group = _group(kind, cluster, plan)
            job = ProbeJob(
                paths, kind, cluster, group, what.timeout_s, say, running_servers, narrow
            )
            return [*_here(beside), *job.run()]

    more = guarded("root", ROOT_ADVICE, check_runs)
    return _here([*checks, *more, *machine.same_everywhere(checks, more)])


def _here(checks: list[Check]) -> list[Check]:
    return [one if one.where else one.at(socket.gethostname()) for one in checks]


def _group(kind: str, cluster: Cluster, plan: Plan | None) -> GroupRequest:
    """Return the trainers of the configuration, with a second host if possible."""
    group = GroupRequest(name=GROUP)
    if plan is not None:
        trainers = plan.trainers
        group = GroupRequest(
            name=GROUP,
            hosts=trainers.hosts,
            workers_per_host=trainers.workers_per_host,
            gpus_per_worker=trainers.gpus_per_worker,
            cpus_per_worker=trainers.cpus_per_worker,
            mem_per_worker=trainers.mem_per_worker,
        )
    if kind == "local" or group.hosts >= HOSTS:
        return group
    fit = [row for row in usable_hosts(cluster) if row.gpus >= gpus_of(group)]
    return replace(group, hosts=max(group.hosts, min(HOSTS, len(fit))))


def usable_hosts(cluster: Cluster) -> list[HostRow]:
    """Return the hosts of the partition that can run jobs; none if Slurm does not answer."""
    try:
        rows = SlurmClient(timeout_s=SINFO_TIMEOUT_S).hosts(cluster.slurm.partition)
    except SchedulerError:
        return []
    return [row for row in rows if row.state.strip("*~#$@+-") in USABLE]


def check_configuration(
    path: Path, overrides: tuple[str, ...], root: Path | None, scheduler: str | None = None
) -> tuple[Settings | None, list[Check]]:
    """Return the settings of a configuration (None if invalid), and their checks."""
    try:
        settings = load_settings(path, overrides, root=root, scheduler=scheduler, planning=True)
    except ConfigError as error:
        return None, [failed("configuration", str(one), "") for one in error.problems]
    except UnreadableInputError as error:
        return None, [failed("configuration", str(error), "")]
    problems = [failed("configuration", str(one), "") for one in settings.missing]
    fine = problems or [ok("configuration", f"the settings of {path} are valid")]
    if (used := settings.profile) is None:
        return settings, fine
    keys = ", ".join(used.settings) or "no setting, because the configuration sets them all"
    return settings, [*fine, ok("site profile", f"{used.file} sets {keys}")]


def check_site_profile() -> tuple[Cluster, list[Check]]:
    """Return the cluster's settings from the site profile, and the check of the profile."""
    path = profiles.in_force()
    if path is None:
        return Cluster(), []
    try:
        cluster = load_profile(path).cluster
    except ConfigError as error:
        return Cluster(), [failed("site profile", str(one), "") for one in error.problems]
    return cluster, [ok("site profile", f"{path} can be used")]


def check_trial_files(
    settings: Settings, plan: Plan, timeout_s: float, scheduler: str = "local"
) -> list[Check]:
    """Run the checks of ``submit`` for the trial of a configuration."""
    found = trial_code.find_own_code(settings)
    code = Code(paths=found.paths)
    settings = described(settings, code, begun_configuration(settings))
    recorder = ProvenanceWriter(settings.config, settings.source.path, found, scheduler)
    said = Proposal(settings, plan, run_paths(settings), scheduler, recorder).ask_slurm()
    findings = check_trial(settings, plan, code, timeout_s=timeout_s, more=said)
    checks = [_check_of(finding) for finding in findings]
    fine = ok("trial", "data, weights, tokenizer, reward and disk space are ready for the run")
    return checks if any(one.state != State.OK for one in checks) else [*checks, fine]


def _check_of(finding: Finding) -> Check:
    make = {Weight.FAILED: failed, Weight.WARNING: warning}.get(finding.weight)
    text = str(finding.problem)
    return make(finding.subject, text, "") if make else ok(finding.subject, text)


def check_scheduler(
    requested: str, kind: str, settings: Settings | None, plan: Plan | None, hosts: Hosts | None
) -> list[Check]:
    """Check that Slurm answers and has the resources of the configuration.

    ``kind`` is the scheduler chosen for ``requested``; ``hosts`` are the hosts of the cluster.
    """
    advice = "see whether Slurm's commands work in your shell (module load slurm, SLURM_CONF)"
    if kind == "local" and requested == AUTO and shutil.which("sbatch"):
        return [
            warning("scheduler", "local: sbatch is installed but finds no configuration", advice)
        ]
    if kind == "local":
        return [ok("scheduler", "local: only this machine")]
    checks = [
        *guarded("slurm version", advice, machine.slurm_version),
        *guarded("scontrol", advice, machine.controller),
    ]
    if settings is None or plan is None:
        return checks
    lacking = build.lacking(plan, settings.config, hosts)
    checks += [failed("hosts", one, "see 'sinfo -N -o \"%N %t %G %c %m\"'") for one in lacking]
    return checks if lacking else [*checks, ok("hosts", "the cluster has what the layout needs")]


def check_root(folder: Path) -> list[Check]:
    """Check the file system of the runs; ``folder`` is a private folder next to the runs."""
    return [
        *guarded("ownership", ROOT_ADVICE, lambda: directory.owner(folder)),
        *guarded("directory", ROOT_ADVICE, lambda: directory.latency(folder)),
        *guarded("disk space", ROOT_ADVICE, lambda: directory.space(folder)),
        *guarded("inodes", ROOT_ADVICE, lambda: directory.inodes(folder)),
        directory.quota(folder),
    ]
