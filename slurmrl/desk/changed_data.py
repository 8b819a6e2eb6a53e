"""Check if a trial's data have changed since its last commit, which keeps the item order.

The module is torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from slurmrl.config.schema import Config
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.prepared import PreparedManifest, read_manifest
from slurmrl.data.source_files import fingerprint_of, state_of
from slurmrl.data.sources import open_source
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.env import user_name
from slurmrl.errors import (
    ConfigError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
)
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import TrialState, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state

MOST_BYTES: Final = 256 * 2**20
"""Bytes of a source that are read; a login node reads them in a few seconds."""


def changed_data(config: Config) -> Iterator[Finding]:
    """Yield the sources that a configuration's trial was trained on and that have changed since.

    Commits of older versions do not know their sources. Raises EnvironmentFailure.
    """
    paths = RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)
    state = fold(History(paths.history).read()) if paths.config.exists() else TrialState()
    if state.last_commit is None:
        return
    try:
        committed = read_state(paths.checkpoints / state.last_commit.directory).get("dataset") or {}
    except (DamagedCheckpointError, EnvironmentFailure):
        return  # the job waits for it, or goes back to the commit before
    known: dict[str, Any] = committed.get("sources") or {}
    step = state.last_commit.step
    for name, part in config.dataset.parts.items():
        same = name not in known or _is_same(part, known[name], paths.data)
        if same is True:
            continue
        weight = _weight(config, state)
        message = (
            f"{part.path} has changed since step {step} of the trial, whose order of rows cannot "
            "be kept: put the old content back, or start another trial: slurmrl submit CONFIG --new"
        )
        if same is None:
            weight = Weight.WARNING
            message = (
                f"{part.path} was written since step {step} of the trial and is too large to be "
                "compared here: the run compares it, and fails if the content has changed"
            )
        key = f"dataset.sources.{name}.path" if name else "dataset.path"
        yield Finding("data", weight, message, key)


def _is_same(part: DatasetConfig, fingerprint: str, prepared: Path) -> bool | None:
    """Return whether a source has the content with this fingerprint.

    None: neither the sizes and times of prepared rows tell it, and the files are too large to be
    read.
    """
    try:
        files = open_source(Path(part.path), part.split).files
    except ConfigError:  # another check reports it
        return True
    present = state_of(files)
    sizes = [file.stat().st_size for file in files]
    for manifest in _manifests(prepared):
        if present and manifest.source_state == present:
            return manifest.source == fingerprint
        before = [int(size) for size in manifest.source_state.split()[::3]]
        if manifest.source == fingerprint and before and before != sizes:
            return False
    if sum(sizes) > MOST_BYTES:
        return None
    return fingerprint_of(files, lambda share: None) == fingerprint


def _manifests(prepared: Path) -> Iterator[PreparedManifest]:
    for directory in prepared.glob("*.*"):
        with suppress(CorruptFileError):
            if (manifest := read_manifest(directory)) is not None:
                yield manifest


def _weight(config: Config, state: TrialState) -> Weight:
    """A trial that is complete would not read its data again."""
    end = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return Weight.FAILED
    more = config.total_steps is not None and end.data["step"] < config.total_steps
    return Weight.FAILED if more and end.data["reason"] == "total_steps" else Weight.WARNING
