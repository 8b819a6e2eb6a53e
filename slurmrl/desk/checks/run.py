"""All checks of a trial before it is queued."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl.child import ChildEnd, ChildRequest
from slurmrl.config.load import dump
from slurmrl.config.schema import Config
from slurmrl.desk import copying
from slurmrl.desk.checks import engines, room
from slurmrl.desk.checks.finding import Finding, Weight
from slurmrl.desk.provenance import torch_build
from slurmrl.errors import ConfigError, SlurmrlError
from slurmrl.fsio import variables
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings
from slurmrl.scheduler.job_environment import of_local_job
from slurmrl.watch import sinks

TIMEOUT_S: Final = 120.0
INSPECTOR: Final = "slurmrl.desk.inspector"
UNCHECKED: Final = "the run checks it when it starts"
ADAPTERS: Final = "adapters"
"""The subject of the only check that nothing repeats."""
SHOWN: Final = 300
"""Characters shown of the last output of a crashed child."""


@dataclass(frozen=True)
class Code:
    """The code that the run can import: an existing snapshot, or the paths of a future one."""

    snapshot: Path | None = None
    paths: Sequence[Path] = ()


def check(
    settings: Settings,
    plan: Plan,
    code: Code,
    *,
    timeout_s: float = TIMEOUT_S,
    compared: set[str] | None = None,
    more: Sequence[Finding] = (),
) -> list[Finding]:
    """Check everything that needs no GPU; return the findings, and ``more``, worst first.

    Change nothing.

    ``compared``: folders of models whose adapters were compared with their base before. That reads
    all of the base, so they are left out; those that are compared now are added.
    Raises EnvironmentFailure, OSError where nothing can be checked.
    """
    findings = [*more, *places(settings), *_torch(settings, plan), *engines.check(settings, plan)]
    findings += room.check(settings)
    findings += _of_inputs(settings, code, timeout_s, set() if compared is None else compared)
    order = list(Weight)
    placed = [_placed(finding, settings) for finding in findings]
    return sorted(placed, key=lambda finding: order.index(finding.weight))


def refuse(findings: Sequence[Finding]) -> None:
    """Raise ConfigError with all findings that would make the run fail."""
    failed = tuple(finding.problem for finding in findings if finding.weight is Weight.FAILED)
    if failed:
        raise ConfigError(failed)


def places(settings: Settings) -> list[Finding]:
    """Check the packages and files that settings name, which takes no time."""
    config = settings.config
    findings = []
    try:
        sinks.check(config.logging)
    except SlurmrlError as error:
        findings.append(Finding("logging", Weight.FAILED, str(error), "logging"))
    try:
        if file := config.cluster.variables_file:
            variables.read(Path(file))
    except SlurmrlError as error:
        findings.append(Finding("variables", Weight.FAILED, str(error), "cluster.variables_file"))
    name = config.notify.webhook
    if name is not None and name not in job_variables(settings):
        message = f"no notice will be sent: cluster.variables_file does not set {name}"
        findings.append(Finding("notify", Weight.WARNING, message, "notify.webhook"))
    return findings


def _torch(settings: Settings, plan: Plan) -> list[Finding]:
    """Check that torch is built for GPUs if workers get some. A container has its own torch."""
    build = torch_build()
    gpus = any(group.gpus_per_worker for group in plan.groups)
    if not gpus or build is None or build.gpus or settings.config.cluster.slurm.container:
        return []
    message = (
        f"each worker gets a GPU, but torch {build.version} in {sys.prefix} is built for CPUs "
        "only: install a CUDA build ('scripts/setup --torch cuda', or see "
        "pytorch.org/get-started), or set gpus_per_worker: 0 to compute on CPUs"
    )
    if settings.config.cluster.slurm.setup:
        message += "; where cluster.slurm.setup brings another torch, add --no-check"
    return [Finding("torch", Weight.FAILED, message, "cluster.gpus_per_worker")]


def _placed(finding: Finding, settings: Settings) -> Finding:
    """Add the place in the configuration to a finding without a place."""
    if finding.where:
        return finding
    where = settings.source.where(tuple(finding.key.split("."))) if finding.key else ""
    return dataclasses.replace(finding, where=where)


# -- the inspector ---------------------------------------------------------------------------


def _of_inputs(
    settings: Settings, code: Code, timeout_s: float, compared: set[str]
) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="slurmrl-check-") as name:
        request = inspect(
            "inputs",
            settings,
            code,
            Path(name),
            job_variables(settings),
            timeout_s,
            compared=sorted(compared),
        )
        replies = list(request)
    findings, begun = _understood(replies, request.ended, timeout_s)
    if ADAPTERS in begun:
        compared |= _models(settings.config)
    return findings


def _models(config: Config) -> set[str]:
    models = map(config.find_model, config.roles)
    return {model.path for model in models if model is not None and model.path is not None}


def inspect(
    subject: str,
    settings: Settings,
    code: Code,
    folder: Path,
    variables: Mapping[str, str],
    limit_s: float | None = None,
    *,
    shown: bool = False,
    **more: Any,
) -> ChildRequest:
    """Return a request to the inspector about a configuration.

    ``folder`` receives the configuration, and the code of a trial that has no snapshot;
    ``variables`` are those of the configuration.
    """
    config = folder / "config.yaml"
    config.write_text(dump(settings.config), encoding="utf-8")
    place = folder / "empty"  # jobs have another current directory than the command, too
    place.mkdir()
    return ChildRequest(
        INSPECTOR,
        {"subject": subject, "config": str(config), **more},
        limit_s=limit_s,
        env=environment(folder, code, variables),
        cwd=place,
        shown=shown,
    )


def environment(folder: Path, code: Code, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job, so that imports fail here as they would there.

    ``folder`` receives a copy of the user's code, without what lies beside it; ``variables`` are
    those of the configuration.
    """
    place = code.snapshot
    if place is None:
        place = folder / "code"
        place.mkdir()
        (place / "slurmrl").symlink_to(Path(slurmrl.__file__).parent)
        for path in code.paths:
            copying.copy(path, place / path.name)
    return {
        **of_local_job(os.environ),
        **variables,
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }


def job_variables(settings: Settings) -> dict[str, str]:
    """Return ``cluster.env`` and the variables of ``variables_file``, if that can be read.

    (If not, another check reports it.)
    """
    cluster = settings.config.cluster
    file = cluster.variables_file
    with contextlib.suppress(SlurmrlError):
        return {**cluster.env, **(variables.read(Path(file)) if file else {})}
    return dict(cluster.env)


def _understood(
    replies: Sequence[dict[str, Any]], ended: ChildEnd, timeout_s: float
) -> tuple[list[Finding], Collection[str]]:
    """Return the inspector's findings, and the subjects of the checks that it has begun.

    The findings include everything that the inspector could not check.
    """
    findings, begun = [], [{"begins": "starting to check", "subject": "checks"}]
    for values in replies:
        if "begins" in values:
            begun.append(values)
        else:
            findings.append(Finding.from_json(values))
    doing, subject = begun[-1]["begins"], begun[-1]["subject"]
    subjects = [one["subject"] for one in begun]
    if not doing and ended.code is not None:
        return findings, subjects
    later = "nothing else does it" if subject == ADAPTERS else UNCHECKED
    if ended.code is None:
        text = f"{doing or 'ending'} took longer than {timeout_s:g} s; {later} (--check-timeout)"
        return [*findings, Finding(subject, Weight.WARNING, text)], subjects
    last = ended.last_line[:SHOWN] or "no output"
    if ended.code == -signal.SIGKILL:
        text = f"the check was killed while {doing}, perhaps for its memory; {later}"
        return [*findings, Finding(subject, Weight.WARNING, text)], subjects
    text = f"{doing} ended the process with code {ended.code}: {last}"
    return [*findings, Finding(subject, Weight.FAILED, text)], subjects
