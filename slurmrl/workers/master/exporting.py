"""Writing a trained model in Hugging Face form from a committed checkpoint. Torch-free."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.export import export
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config, Model
from slurmrl.errors import CheckpointError, CorruptFileError, UsageError
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.primitives import is_temporary
from slurmrl.history.log import History
from slurmrl.history.state import Commit, fold
from slurmrl.models.config import Head
from slurmrl.models.storage import file_form
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan

ROLE = "actor"
LEFT_S = 24 * 3600.0
"""Age at which a temporary folder is what a killed export left, and not one that is being written.
"""


def architecture_of(model: Model) -> dict[str, Any]:
    """A role's config.json: given in the configuration, or by the folder it started from."""
    if model.architecture is not None:
        return model.architecture
    assert model.path is not None, "checked at submission"
    values: dict[str, Any] = json.loads((Path(model.path) / "config.json").read_text())
    return values


def export_actor(paths: RunPaths, config: Config, commit: Commit) -> Path:
    """The folder ``export/step-<s>`` of a commit, loadable by transformers."""
    return _export(paths, config, commit, ROLE, "lm", paths.export(commit.step))


def export_step(paths: RunPaths, role: str, step: int | None, target: Path | None) -> Path:
    """What a command exports: a commit of any trial, whether it runs or not; by default the newest,
    into its own folder. A commit that the run deletes meanwhile is another one to choose.

    Raises UsageError for a step or a role that there is not, or a target that is in use.
    """
    config = load_resolved(paths.config)
    head = _head(paths, role)
    if target is not None:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(f"{target} exists already: choose a folder that does not")
        make_private_directory(target.parent)
    while True:
        commit = _choose(paths, step)
        folder = target or paths.export(commit.step, role)
        try:
            return _export(paths, config, commit, role, head, folder)
        except (CheckpointError, CorruptFileError):
            if commit in fold(History(paths.history).read()).commits:
                raise


def _choose(paths: RunPaths, step: int | None) -> Commit:
    commits = fold(History(paths.history).read()).commits
    if not commits:
        raise UsageError(f"{paths.experiment}/{paths.trial} has no checkpoint yet")
    found = [commit for commit in commits if step in (None, commit.step)]
    if not found:
        known = ", ".join(str(commit.step) for commit in commits)
        raise UsageError(f"no checkpoint of step {step}; there are: {known}")
    return found[-1]


def _head(paths: RunPaths, role: str) -> Head:
    """Of a role that is trained: others have no part in a checkpoint."""
    models = Plan.read(paths.plan).models
    trained = sorted(name for name, model in models.items() if model.trained)
    if role not in trained:
        raise UsageError(f"'{role}' is not in the checkpoints; there are: {', '.join(trained)}")
    head: Head = models[role].head
    return head


def _export(
    paths: RunPaths, config: Config, commit: Commit, role: str, head: Head, target: Path
) -> Path:
    _sweep(paths)
    model: Model = getattr(config, role)
    values, storage = file_form(architecture_of(model), model.implementation, head)
    tokenizer = model.tokenizer or config.actor.tokenizer
    return export(
        paths.checkpoints / commit.directory,
        role,
        values,
        target,
        storage=storage,
        tokenizer=Path(tokenizer) if tokenizer else None,
    )


def _sweep(paths: RunPaths) -> None:
    with suppress(OSError):
        for folder in filter(lambda entry: is_temporary(entry.name), paths.exports.iterdir()):
            if time.time() - folder.stat().st_mtime > LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)
