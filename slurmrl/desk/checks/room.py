"""Check of the disk space for the checkpoints and the tokenised data of a trial."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from slurmrl.config.allocation import parse
from slurmrl.desk.checks.finding import Finding, Weight
from slurmrl.env import user_name
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.dataflow import Head
from slurmrl.plan.estimates.memory import BYTES
from slurmrl.plan.estimates.shape import parameters, shape_of, trained_shard
from slurmrl.plan.settings import Settings
from slurmrl.run.paths import RunPaths

GIB: Final = 2**30
SCALAR_BYTES: Final = 4
"""Weights, moments and exports are kept in float32."""

PREPARED_BYTES_PER_BYTE: Final = 2
"""The line, the tokens and the index entry of a row of 100 bytes or more take less than this."""


def check(settings: Settings) -> list[Finding]:
    """Check the disk space. Raises OSError for a file system that does not answer."""
    config = settings.config
    checkpoint, export = checkpoint_bytes(settings), 0
    if config.checkpoint.export_at_end:
        export = _parameters(settings, "actor", "lm") * SCALAR_BYTES
    paths = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
    there = _checkpoints(paths)
    copies = max(config.checkpoint.keep_last + 1 - there, 1)
    data = data_bytes(settings) if not _holds(paths.data) else 0
    versions = version_bytes(settings)
    needed = copies * checkpoint + export + versions + data
    folder = next(path for path in (paths.run, *paths.run.parents) if path.exists())
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free >= needed:
        return []
    parts = [f"{copies} checkpoints of {_size(checkpoint)}"]
    parts += [f"an export of {_size(export)}"] if export else []
    parts += [f"{_size(versions)} of whole weight versions"] if versions else []
    parts += [f"{_size(data)} of tokenised data"] if data else []
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
        if use.trained:
            tensors = 1 + len(settings.config.model(use.role).optimizer.moments)
            total += _trained(settings, use.role, use.head) * tensors * SCALAR_BYTES
        elif settings.config.model(use.role).ema is not None:
            total += _parameters(settings, use.role, use.head) * SCALAR_BYTES
    return total


def version_bytes(settings: Settings) -> int:
    """Estimate the bytes of the complete weight versions.

    There is one more than `rollout.publish.keep_whole` before an old one is removed. The size of
    the versions between complete ones depends on the training.
    """
    publish = settings.config.rollout.publish
    if publish is None:
        return 0
    actor = settings.config.actor
    if actor.lora is None:
        whole = _parameters(settings, "actor", "lm") * BYTES[actor.dtype]
    else:
        whole = _trained(settings, "actor", "lm") * SCALAR_BYTES
    return (publish.keep_whole + 1) * whole


def data_bytes(settings: Settings) -> int:
    """Estimate the bytes of the tokenised data; a file that cannot be read counts 0."""
    total = 0
    for path in map(Path, settings.config.data_paths()):
        with suppress(OSError):
            files = path.rglob("*") if path.is_dir() else [path]
            total += sum(file.stat().st_size for file in files)
    return total * PREPARED_BYTES_PER_BYTE


def _holds(folder: Path) -> bool:
    """Whether a folder is there and not empty."""
    return folder.is_dir() and any(folder.iterdir())


def _parameters(settings: Settings, role: str, head: Head) -> int:
    shape = shape_of(settings.config.model(role))
    return round(parameters(shape, parse("fsdp:d1"), head).total) if shape else 0


def _trained(settings: Settings, role: str, head: Head) -> int:
    model = settings.config.model(role)
    shape = shape_of(model)
    return round(trained_shard(model, shape, parse("fsdp:d1"), head)) if shape else 0


def _checkpoints(paths: RunPaths) -> int:
    """Return the number of existing checkpoints."""
    return len(list(paths.checkpoints.iterdir())) if paths.checkpoints.is_dir() else 0


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
