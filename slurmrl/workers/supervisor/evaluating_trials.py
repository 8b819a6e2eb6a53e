"""Which trials evaluate checkpoints of which, by the models in their configurations."""

from __future__ import annotations

from pathlib import Path

from slurmrl.config import source
from slurmrl.run import evaluated
from slurmrl.run.paths import RunPaths


def subject(paths: RunPaths) -> RunPaths | None:
    """The trial whose checkpoint a trial evaluates; None if it evaluates none, or does something
    else. Raises ConfigError, UsageError."""
    model = _model(paths)
    if model is None or len(model.parents) < 2:
        return None
    found = RunPaths(model.parents[1])
    if evaluated.checkpoint_of(found, model) is None or not found.config.is_file():
        return None
    return found if found.evaluated().resolve() == paths.run.parent.resolve() else None


def users(paths: RunPaths, step: int, model: Path) -> list[RunPaths]:
    """The trials that evaluate a folder of a step of a trial, by whatever path to the root they do
    so. Raises as `subject`."""
    own = (trial for number, trial in evaluated.trials(paths) if number == step)
    found = ((trial, _model(trial)) for trial in own if trial.config.is_file())
    return [trial for trial, of in found if of is not None and of.parts[-4:] == model.parts[-4:]]


def _model(paths: RunPaths) -> Path | None:
    """The folder with a trial's model."""
    actor = source.read(paths.config).values.get("actor")
    path = actor.get("path") if isinstance(actor, dict) else None
    return Path(path) if isinstance(path, str) else None
