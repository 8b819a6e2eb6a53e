"""Whether the data of a trial have changed since its last commit, which keeps the order of the
items. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Config
from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.prepared import read_manifest
from slurmrl.data.sources import open_source
from slurmrl.data.sources.base import fingerprint_of, state_of
from slurmrl.desk.checks.finding import Finding, Weight
from slurmrl.env import user_name
from slurmrl.errors import (
    ConfigError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
)
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind
from slurmrl.run.history.state import TrialState, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state


def changed_data(config: Config) -> Iterator[Finding]:
    """Yield the sources that the trial of a configuration was trained on and that now have another
    content. Commits of older versions do not know their sources.

    Raises EnvironmentFailure.
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
    for name, part in config.dataset.parts.items():
        if name not in known or _is_same(part, known[name], paths.data):
            continue
        message = (
            f"{part.path} has changed since step {state.last_commit.step} of the trial, whose "
            "order of rows cannot be kept: put the old content back, or submit a new trial (--new)"
        )
        key = f"dataset.sources.{name}.path" if name else "dataset.path"
        yield Finding("data", _weight(config, state), message, key)


def _is_same(part: DatasetConfig, fingerprint: str, prepared: Path) -> bool:
    """Whether a source has the content with this fingerprint. Files are read only if their sizes or
    times are not those of prepared rows."""
    try:
        files = open_source(Path(part.path), part.split).files
    except ConfigError:  # another check reports it
        return True
    present = state_of(files)
    for directory in prepared.glob("*.*") if present else ():
        with suppress(CorruptFileError):
            manifest = read_manifest(directory)
            if manifest is not None and manifest.source_state == present:
                return manifest.source == fingerprint
    return fingerprint_of(files, lambda share: None) == fingerprint


def _weight(config: Config, state: TrialState) -> Weight:
    """A trial that is complete would not read its data again."""
    end = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return Weight.FAILED
    more = config.total_steps is not None and end.data["step"] < config.total_steps
    return Weight.FAILED if more and end.data["reason"] == "total_steps" else Weight.WARNING
