"""The checks of the machine from which jobs are submitted."""

from __future__ import annotations

import shutil
from pathlib import Path

from slurmrl.config import profiles
from slurmrl.config.load import load_profile
from slurmrl.config.schema import Cluster
from slurmrl.desk import trial_code
from slurmrl.desk.doctor import directory, disk, limits, slurm, software
from slurmrl.desk.doctor.check import Check, State, failed, guarded, ok, warning
from slurmrl.desk.inspection import described
from slurmrl.desk.proposal import Proposal, begun_configuration, run_paths
from slurmrl.desk.provenance import ProvenanceWriter
from slurmrl.desk.trial_checks import Code, Finding, Weight, check_trial
from slurmrl.errors import ConfigError, UnreadableInputError
from slurmrl.plan import resources
from slurmrl.plan.model import Plan
from slurmrl.plan.resources import Hosts
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.scheduler import AUTO

ROOT_ADVICE = "choose a folder of yours on a directory that all hosts share: --root or SLURMRL_ROOT"


def configuration(
    path: Path, overrides: tuple[str, ...], root: Path | None, scheduler: str | None = None
) -> tuple[Settings | None, list[Check]]:
    """The settings of a configuration (None if invalid) and the checks of them."""
    try:
        settings = load_settings(path, overrides, root=root, scheduler=scheduler, planning=True)
    except ConfigError as error:
        return None, [failed("configuration", str(one), "") for one in error.problems]
    except UnreadableInputError as error:
        return None, [failed("configuration", str(error), "")]
    problems = [failed("configuration", str(one), "") for one in settings.missing]
    fine = problems or [ok("configuration", f"{path} can be submitted")]
    if (used := settings.profile) is None:
        return settings, fine
    keys = ", ".join(used.settings) or "nothing that the configuration leaves open"
    return settings, [*fine, ok("site profile", f"{used.file} sets {keys}")]


def site_profile() -> tuple[Cluster, list[Check]]:
    """The cluster's settings without a configuration, and the check of the profile with them."""
    path = profiles.in_force()
    if path is None:
        return Cluster(), []
    try:
        cluster = load_profile(path).cluster
    except ConfigError as error:
        return Cluster(), [failed("site profile", str(one), "") for one in error.problems]
    return cluster, [ok("site profile", f"{path} can be used")]


def trial(
    settings: Settings, plan: Plan, timeout_s: float, scheduler: str = "local"
) -> list[Check]:
    """What ``submit`` looks at before it queues the trial of a configuration."""
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


def scheduler(
    requested: str,
    kind: str,
    settings: Settings | None,
    plan: Plan | None,
    hosts: Hosts | None,
) -> list[Check]:
    """Whether Slurm answers and has what the configuration needs.

    ``kind`` is the scheduler that ``requested`` stands for; ``hosts`` are the cluster's.
    """
    advice = "see whether Slurm's commands work in your shell (module load slurm, SLURM_CONF)"
    if kind == "local" and requested == AUTO and shutil.which("sbatch"):
        return [warning("scheduler", "local: sbatch is here, but finds no configuration", advice)]
    if kind == "local":
        return [ok("scheduler", "local: this machine alone")]
    checks = [
        *guarded("slurm version", advice, slurm.version),
        *guarded("scontrol", advice, slurm.controller),
    ]
    if settings is None or plan is None:
        return checks
    lacking = resources.lacking(plan, settings.config, hosts)
    checks += [failed("hosts", one, "see 'sinfo -N -o \"%N %t %G %c %m\"'") for one in lacking]
    return checks if lacking else [*checks, ok("hosts", "the cluster has what the layout needs")]


def machine() -> list[Check]:
    """Checks that do not depend on the directory of the runs."""
    return [
        *limits.check(),
        software.python(),
        *software.packages(gpus=False),
        software.optional_packages(),
        software.operators(),
    ]


def root(folder: Path) -> list[Check]:
    """``folder`` lies beside the runs and is ours."""
    return [
        *guarded("ownership", ROOT_ADVICE, lambda: directory.owner(folder)),
        *guarded("directory", ROOT_ADVICE, lambda: directory.latency(folder)),
        *guarded("disk space", ROOT_ADVICE, lambda: disk.space(folder)),
        *guarded("inodes", ROOT_ADVICE, lambda: disk.inodes(folder)),
        disk.quota(folder),
    ]
