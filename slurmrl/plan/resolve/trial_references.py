"""``trial:EXPERIMENT/TRIAL`` is the newest export of that trial, and
``trial:EXPERIMENT/TRIAL@STEP`` that of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.config.schema import Config, role_key
from slurmrl.config.schema.base import NAME_PATTERN
from slurmrl.config.schema.model import TRIAL_PREFIX
from slurmrl.config.source import Source, read
from slurmrl.errors import Problem, UsageError
from slurmrl.paths import RunPaths, user_name

FIELDS: Final = ("path", "tokenizer")
LONGEST: Final = 8
"""Trials that start from each other and are followed."""
_EXPORT: Final = re.compile(r"step-(\d+)")


class TrialReference(NamedTuple):
    experiment: str
    trial: str
    step: int | None
    """None: that of the newest export."""


def resolve(
    config: Config, root: Path, source: Source, *, planning: bool = False
) -> tuple[Config, list[Problem]]:
    """Replace all references by the folders of exports. A reference without an export is a problem
    and becomes null; when ``planning``, the architecture that its trial will export replaces it."""
    problems: list[Problem] = []
    update = {}
    for role in config.roles:
        model = config.find_model(role)
        if model is None:
            continue
        changes: dict[str, Any] = {}
        for name in FIELDS:
            text = getattr(model, name)
            if text is None or not text.startswith(TRIAL_PREFIX):
                continue
            try:
                changes[name] = str(export_of(text, root, source.path.parent))
            except UsageError as error:
                problems.append(source.problem((*role_key(role), name), str(error)))
                changes[name] = None
                if planning and name == "path":
                    changes["architecture"] = promised(text, root, source.path.parent)
        update[role] = model.model_copy(update=changes)
    return config.with_models(update), problems


def parse(text: str) -> TrialReference:
    """Raises UsageError with the expected form."""
    experiment, _, rest = text.removeprefix(TRIAL_PREFIX).partition("/")
    trial, at, step = rest.partition("@")
    named = all(NAME_PATTERN.fullmatch(name) and ".." not in name for name in (experiment, trial))
    if not named or bool(at) != bool(re.fullmatch(r"[0-9]{1,9}", step)):
        raise UsageError(
            f"'{text}' is not allowed: expected {TRIAL_PREFIX}EXPERIMENT/TRIAL, with @STEP for the "
            "export of a step"
        )
    return TrialReference(experiment, trial, int(step) if at else None)


def export_of(text: str, root: Path, configs: Path) -> Path:
    """The folder of the export that a reference names. Raises UsageError with what to do first; the
    configuration to submit is searched for in ``configs``."""
    experiment, trial, step = parse(text)
    exports = RunPaths.of(root, user_name(), experiment, trial).exports
    steps = {}
    if exports.is_dir():
        matches = ((_EXPORT.fullmatch(folder.name), folder) for folder in exports.iterdir())
        steps = {int(match[1]): folder for match, folder in matches if match}
    if not steps and exports.is_dir() and any(exports.glob("step-*-adapter")):
        raise UsageError(
            f"'{text}' has exports of adapters only in {exports}; export a whole model: "
            f"slurmrl export {experiment}/{trial} --form merged"
        )
    if not steps and step is None:
        raise UsageError(
            f"'{text}' has no export yet in {exports}; first let that trial finish: "
            f"slurmrl submit {_config_of(experiment, configs)}"
        )
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps))) or "none"
        raise UsageError(
            f"'{text}' has no export yet (exports in {exports}: {known}); export the "
            f"checkpoint first: slurmrl export {experiment}/{trial} --step {step}"
        )
    return steps[max(steps) if step is None else step]


def promised(
    text: str, root: Path, configs: Path, *, longest: int = LONGEST
) -> dict[str, Any] | None:
    """The architecture of a referenced trial that has no export yet, from its run directory or from
    the configuration next to this one, or that of the trial that it starts from itself; None if
    none states it."""
    try:
        experiment, trial, _ = parse(text)
    except UsageError:
        return None
    files = [
        RunPaths.of(root, user_name(), experiment, trial).config,
        _find(experiment, configs),
    ]
    for path in files:
        if path is None or not path.is_file():
            continue
        actor = read(path).values.get("actor")
        if not isinstance(actor, dict):
            continue
        if isinstance(actor.get("architecture"), dict):
            return dict(actor["architecture"])
        start = str(actor.get("path"))
        if start.startswith(TRIAL_PREFIX) and longest > 0:
            return promised(start, root, configs, longest=longest - 1)
    return None


def _config_of(experiment: str, folder: Path) -> str:
    """The configuration file of the experiment, for the hint."""
    path = _find(experiment, folder)
    return f"<the configuration of experiment {experiment}>" if path is None else str(path)


def _find(experiment: str, folder: Path) -> Path | None:
    for path in sorted(folder.glob("*.yaml")):
        try:
            found = read(path).values.get("experiment")
        except UsageError:
            continue  # it is no configuration
        if found == experiment:
            return path
    return None
