"""All checks of a trial before it is queued."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl import child, log
from slurmrl.child import ChildEnd, ChildRequest
from slurmrl.config.load import dump
from slurmrl.config.schema import Cluster, Config, role_key
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.config.source import KeyPath, dotted
from slurmrl.desk import copying
from slurmrl.desk.provenance import torch_build
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, Problem, SlurmrlError
from slurmrl.fsio import inputs
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.build import lacking_gpus
from slurmrl.plan.engine_rules import ENGINES
from slurmrl.plan.estimates.memory import saved, total_bytes, whole_weights
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.estimates.worker_memory import ONE_RANK, version_size
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import local_environment
from slurmrl.watch import sinks

logger = log.get(__name__)

CHECK_TIMEOUT_S: Final = 120.0
INSPECTOR: Final = "slurmrl.desk.inspector"
UNCHECKED: Final = "the run checks it when it starts"
ADAPTERS: Final = "adapters"
"""The subject of the only check that the run does not repeat."""
POSITIONS: Final = "positions"
"""The subject of notes on sequences that may exceed the model's positions."""
SHOWN: Final = 300
"""Maximum number of characters to show from a crashed child's last output."""
GIB: Final = 2**30
PREPARED_BYTES_PER_BYTE: Final = 2
"""Maximum bytes of prepared rows per byte of data: the line, its tokens and its index entry."""
ENGINE: Final = "engine"
SERVER_TIMEOUT_S: Final = 60.0
FIND_MODULE: Final = (
    "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
)
OF_CLIENT: Final = "aiohttp"
"""Module with which slurmrl sends requests to servers."""
TRANSFORMER_ENGINE: Final = "transformer_engine"


class Weight(StrEnum):
    FAILED = "failed"
    """The run would fail."""
    WARNING = "warning"
    """The run might fail, or something was not checked."""
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    subject: str
    """``data``, ``reward``, ``tokenizer``, ``weights``, ``disk space``, …"""
    weight: Weight
    message: str
    key: str = ""
    """Dotted key of the setting, or of the line that ``where`` names."""
    where: str = ""
    """File and line; empty for a setting in the configuration."""

    @property
    def problem(self) -> Problem:
        return Problem(self.where, self.key, self.message)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Finding:
        return Finding(**{**values, "weight": Weight(values["weight"])})


@dataclass(frozen=True)
class Code:
    """The code that the run can import: an existing snapshot, or paths to put into a snapshot."""

    snapshot: Path | None = None
    paths: Sequence[Path] = ()


def check_trial(
    settings: Settings,
    plan: Plan,
    code: Code,
    *,
    timeout_s: float = CHECK_TIMEOUT_S,
    compared: set[str] | None = None,
    more: Sequence[Finding] = (),
) -> list[Finding]:
    """Check everything that needs no GPU; return all findings, with ``more``, the worst first.

    Nothing is changed on disk.

    ``compared``: folders of models whose adapters were compared with their base model earlier. The
    comparison reads the whole base model, so these folders are skipped. Folders that this call
    compares are added to the set.

    Raises EnvironmentFailure or OSError if nothing can be checked.
    """
    findings = [
        *more,
        *places(settings),
        *_torch(settings, plan),
        *missing_packages(settings, plan),
    ]
    findings += disk_space(settings)
    findings += of_inputs(settings, code, timeout_s, set() if compared is None else compared)
    order = list(Weight)
    placed = [_placed(finding, settings) for finding in findings]
    return sorted(placed, key=lambda finding: order.index(finding.weight))


def reject(findings: Sequence[Finding]) -> None:
    """Raise ConfigError with all findings that would make the run fail."""
    failed = tuple(finding.problem for finding in findings if finding.weight is Weight.FAILED)
    if failed:
        raise ConfigError(failed)


def places(settings: Settings) -> list[Finding]:
    """Check the packages and files that settings name; this takes almost no time."""
    config = settings.config
    findings = []
    try:
        sinks.check(config.logging)
    except SlurmrlError as error:
        findings.append(Finding("logging", Weight.FAILED, str(error), "logging"))
    try:
        if file := config.cluster.variables_file:
            inputs.read_variables(Path(file))
    except SlurmrlError as error:
        findings.append(Finding("variables", Weight.FAILED, str(error), "cluster.variables_file"))
    name = config.notify.webhook
    if name is not None and name not in job_variables(config.cluster):
        message = f"no notice will be sent: cluster.variables_file does not set {name}"
        findings.append(Finding("notify", Weight.WARNING, message, "notify.webhook"))
    return findings


def _torch(settings: Settings, plan: Plan) -> list[Finding]:
    """Check that torch is built for GPUs if workers get GPUs. A container has its own torch."""
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
        message += "; if cluster.slurm.setup provides another torch, add --no-check"
    return [Finding("torch", Weight.FAILED, message, "cluster.gpus_per_worker")]


def _placed(finding: Finding, settings: Settings) -> Finding:
    """Add the place in the configuration to a finding without a place."""
    if finding.where:
        return finding
    where = settings.source.where(tuple(finding.key.split("."))) if finding.key else ""
    return dataclasses.replace(finding, where=where)


# -- the inspector ---------------------------------------------------------------------------


def of_inputs(
    settings: Settings, code: Code, timeout_s: float, compared: set[str], only: Sequence[str] = ()
) -> list[Finding]:
    """Return the findings of the checks of inputs; ``only`` selects subjects."""
    variables, done = job_variables(settings.config.cluster), sorted(compared)
    with asking_inspector(
        "inputs", settings, code, variables, timeout_s, compared=done, only=list(only)
    ) as request:
        replies = list(request)
    findings, begun = _understood(replies, request.ended, timeout_s)
    if ADAPTERS in begun:
        compared |= _models(settings.config)
    return findings


def _models(config: Config) -> set[str]:
    models = map(config.find_model, config.roles)
    return {model.path for model in models if model is not None and model.path is not None}


@contextlib.contextmanager
def asking_inspector(
    subject: str,
    settings: Settings,
    code: Code,
    variables: Mapping[str, str],
    limit_s: float | None = None,
    *,
    shown: bool = False,
    **more: Any,
) -> Iterator[ChildRequest]:
    """Yield a request to the inspector about a configuration, with a folder for its files.

    ``variables`` are the environment variables that the configuration sets; ``limit_s`` and
    ``shown`` are explained at `ChildRequest`.
    """
    with tempfile.TemporaryDirectory(prefix="slurmrl-inspect-") as name:
        folder = Path(name)
        config = folder / "config.yaml"
        config.write_text(dump(settings.config), encoding="utf-8")
        place = folder / "empty"  # Like a job, the child does not run in the command's directory.
        place.mkdir()
        yield ChildRequest(
            INSPECTOR,
            {"subject": subject, "config": str(config), **more},
            limit_s=limit_s,
            env=environment(folder, code, variables),
            cwd=place,
            shown=shown,
        )


def environment(folder: Path, code: Code, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job, so that imports which fail in a job also fail here.

    A copy of the user's code goes into ``folder`` if there is no snapshot yet. ``variables`` are
    the environment variables that the configuration sets.
    """
    place = code.snapshot
    if place is None:
        place = folder / "code"
        place.mkdir()
        (place / "slurmrl").symlink_to(Path(slurmrl.__file__).parent)
        for path in code.paths:
            copying.copy(path, place / path.name)
    return {
        **local_environment(os.environ),
        **variables,
        "PYTHONPATH": str(place),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }


def job_variables(cluster: Cluster) -> dict[str, str]:
    """Return ``cluster.env`` and the variables of ``variables_file``.

    Omit an unreadable file, which another check reports.
    """
    file = cluster.variables_file
    with contextlib.suppress(SlurmrlError):
        return {**cluster.env, **(inputs.read_variables(Path(file)) if file else {})}
    return dict(cluster.env)


def _understood(
    replies: Sequence[dict[str, Any]], ended: ChildEnd, timeout_s: float
) -> tuple[list[Finding], Collection[str]]:
    """Return the inspector's findings, and the subjects of the checks that it has begun.

    A finding reports a check that the inspector could not complete.
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
    later = "nothing else checks it" if subject == ADAPTERS else UNCHECKED
    if ended.code is None:
        text = f"{doing or 'ending'} took longer than {timeout_s:g} s; {later} (--check-timeout)"
        return [*findings, Finding(subject, Weight.WARNING, text)], subjects
    last = ended.last_line[:SHOWN] or "no output"
    if ended.code == -signal.SIGKILL:
        text = f"the check was killed while {doing}, perhaps for using too much memory; {later}"
        return [*findings, Finding(subject, Weight.WARNING, text)], subjects
    text = f"{doing} ended the process with code {ended.code}: {last}"
    return [*findings, Finding(subject, Weight.FAILED, text)], subjects


def disk_space(settings: Settings) -> list[Finding]:
    """Check the free disk space. Raises OSError for a file system that does not answer."""
    config = settings.config
    checkpoint, export = checkpoint_bytes(settings), 0
    if config.checkpoint.export_at_end and (shape := shape_of(config.actor)) is not None:
        export = round(whole_weights(shape, ONE_RANK, "float32"))
    paths = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
    there = len(list(paths.checkpoints.glob("*")))
    copies = max(config.checkpoint.keep_last + 1 - there, 1)
    data = 0 if any(paths.data.glob("*")) else data_bytes(settings)
    versions = version_bytes(settings)
    needed = copies * checkpoint + export + versions + data
    folder = next(path for path in (paths.run, *paths.run.parents) if path.exists())
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free >= needed:
        return []
    parts = [f"{copies} checkpoints of {_size(checkpoint)}"]
    parts += [f"an export of {_size(export)}"] if export else []
    parts += [f"{_size(versions)} of full weight versions"] if versions else []
    parts += [f"{_size(data)} of tokenized data"] if data else []
    message = (
        f"{_size(free)} are free in {folder}, but the run needs about {_size(needed)}: "
        f"{', '.join(parts)}; choose another root, or lower checkpoint.keep_last"
    )
    return [Finding("disk space", Weight.FAILED, message, "root")]


def checkpoint_bytes(settings: Settings) -> int:
    """Estimate the bytes of one checkpoint: weights and optimizer states of the trained models.

    A model of unknown architecture counts 0.
    """
    total = 0
    for use in uses_of(settings.config, settings.algorithm):
        model = settings.config.model(use.role)
        if (shape := shape_of(model)) is not None:
            total += total_bytes(saved(model, shape, ONE_RANK, use.head, trained=use.trained))
    return total


def version_bytes(settings: Settings) -> int:
    """Estimate the bytes of the complete weight versions.

    Their number is at most ``rollout.publish.keep_whole`` + 1, because an old version is removed
    after a new one was written. Versions that contain only changes are not estimated.
    """
    publish = settings.config.rollout.publish
    return 0 if publish is None else round((publish.keep_whole + 1) * version_size(settings.config))


def data_bytes(settings: Settings) -> int:
    """Estimate the bytes of the tokenized data; a file that cannot be read counts 0."""
    total = 0
    for path in map(Path, settings.config.data_paths()):
        with suppress(OSError):
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(file.stat().st_size for file in files)
    return total * PREPARED_BYTES_PER_BYTE


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def missing_packages(settings: Settings, plan: Plan) -> list[Finding]:
    """Return findings about engines whose GPU or package is missing.

    A container has separate packages, so they are not checked. Set-up lines may provide packages,
    so a missing package is then only a warning.
    """
    slurm = settings.config.cluster.slurm
    without = [
        Finding(ENGINE, Weight.FAILED, problem.message, problem.key)
        for problem in lacking_gpus(settings, plan)
    ]
    if slurm.container:
        return without
    weight = Weight.WARNING if slurm.setup else Weight.FAILED
    hint = " (the setup lines of the job may provide it)" if slurm.setup else ""
    found = dict(_missing(settings, plan))
    return without + [Finding(ENGINE, weight, f"{text}{hint}", key) for key, text in found.items()]


def _missing(settings: Settings, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the key of each setting whose package is missing, and a message."""
    rollout, reported = settings.config.rollout, set[str]()
    for model in plan.models.values():
        rules = ENGINES[model.engine]
        if model.role == ROLLOUTS:
            yield from _of_servers(model.engine, rules.module, rollout.python)
            continue
        section = settings.config.model(model.role)
        if rules.module and not _is_here(rules.module) and model.engine not in reported:
            reported.add(model.engine)
            key = dotted((*role_key(model.role), "backend"))
            yield key, f"{model.engine} needs a package that {sys.prefix} lacks: {rules.install}"
        wanted = "fp8" if section.fp8 else "transformer_engine"
        if rules.module and getattr(section, wanted) and not _is_here(TRANSFORMER_ENGINE):
            key = dotted((*role_key(model.role), wanted))
            yield key, f"{sys.prefix} lacks TransformerEngine (docs/engines.md)"


def _of_servers(engine: str, module: str, python: str | None) -> Iterator[tuple[str, str]]:
    """Yield the keys and messages of missing packages of servers.

    The ``module`` is empty for an engine without a server.
    """
    if not module:
        return
    if not _is_here(OF_CLIENT):
        yield "rollout.backend", f"{engine} needs a package that {sys.prefix} lacks: aiohttp"
    if python is None:
        return
    try:
        code = child.run([python, "-c", FIND_MODULE, module], SERVER_TIMEOUT_S).code
    except OSError as error:
        yield "rollout.python", f"{python} does not run: {error}"
        return
    if code is None:
        yield "rollout.python", f"{python} did not answer within {SERVER_TIMEOUT_S:.0f} s"
    elif code != 0:
        yield "rollout.python", f"{python} has no {engine}: install it there"


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # A package that contains the module is missing.
        return False


def described(settings: Settings, code: Code, begun: Config | None = None) -> Settings:
    """Return the settings with schemas of tools for each dataset of `undescribed`.

    ``begun`` is the configuration of a trial that continues; its schemas, or their absence, are
    kept. Settings that come from the configuration file of a trial are returned unchanged.
    """
    config = settings.config
    if settings.source.resolved or not undescribed(config):
        return settings
    if begun is None:
        made = _made(settings, code)
    else:
        made = {dotted(key): dataset.tools for key, dataset in begun.datasets().items()}
    wanted = {key: made.get(dotted(key)) for key in undescribed(config)}

    def with_tools(key: KeyPath, dataset: DatasetConfig) -> DatasetConfig:
        if (tools := wanted.get(key)) is None:
            return dataset
        return dataset.model_copy(update={"tools": tuple(tools)})

    return dataclasses.replace(settings, config=config.with_datasets(with_tools))


def undescribed(config: Config) -> Mapping[KeyPath, DatasetConfig]:
    """Return the datasets without schemas whose prompts may describe the episode's tools."""
    if not config.rollout.episode.describes_tools or config.actor.tokenizer is None:
        return {}
    return {
        key: dataset
        for key, dataset in config.datasets().items()
        if dataset.kind == "prompt" and dataset.is_chat and dataset.tools is None
    }


def _made(settings: Settings, code: Code) -> dict[str, Any]:
    """Return schemas of tools from a child process, because transformers imports torch for them."""
    variables = job_variables(settings.config.cluster)
    with asking_inspector("tools", settings, code, variables, CHECK_TIMEOUT_S) as request:
        made = request.last()
    if request.ended.code == 0:
        return made
    reason = request.ended.last_line or f"exit code {request.ended.code}"
    if request.ended.code is None:
        reason = f"making their schemas took longer than {CHECK_TIMEOUT_S:g} s"
    logger.warning("prompts do not describe the tools of rollout.episode.tools: %s", reason)
    return {}
