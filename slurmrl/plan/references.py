"""``trial:EXPERIMENT/TRIAL`` stands for the newest export of that trial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from slurmrl.config.schema import Config
from slurmrl.config.schema.base import NAME_PATTERN
from slurmrl.config.schema.model import TRIAL_PREFIX
from slurmrl.config.source import Source
from slurmrl.errors import Problem, UsageError
from slurmrl.paths import RunPaths, user_name

ROLES: Final = ("actor", "critic", "ref")
FIELDS: Final = ("path", "tokenizer")
_EXPORT: Final = re.compile(r"step-(\d+)")


def resolve(config: Config, root: Path, source: Source) -> tuple[Config, list[Problem]]:
    """Put the folders of exports in place of all references; those without one are problems and
    become null."""
    problems: list[Problem] = []
    update = {}
    for role in ROLES:
        model = getattr(config, role)
        if model is None:
            continue
        changes: dict[str, str | None] = {}
        for name in FIELDS:
            text = getattr(model, name)
            if text is None or not text.startswith(TRIAL_PREFIX):
                continue
            try:
                changes[name] = str(newest_export(text, root, source.path.parent))
            except UsageError as error:
                problems.append(source.problem((role, name), str(error)))
                changes[name] = None
        update[role] = model.model_copy(update=changes)
    return config.model_copy(update=update), problems


def newest_export(text: str, root: Path, configs: Path) -> Path:
    """The folder behind ``trial:EXPERIMENT/TRIAL``. Raises UsageError that says which
    configuration to submit first; ``configs`` is where to look for it."""
    experiment, _, trial = text.removeprefix(TRIAL_PREFIX).partition("/")
    if not all(NAME_PATTERN.fullmatch(name) and ".." not in name for name in (experiment, trial)):
        raise UsageError(f"'{text}' is not allowed: expected {TRIAL_PREFIX}EXPERIMENT/TRIAL")
    exports = RunPaths.of(root, user_name(), experiment, trial).exports
    steps = {}
    if exports.is_dir():
        matches = ((_EXPORT.fullmatch(folder.name), folder) for folder in exports.iterdir())
        steps = {int(match[1]): folder for match, folder in matches if match}
    if not steps:
        raise UsageError(
            f"'{text}' has no export yet in {exports}; first let that trial finish: "
            f"slurmrl submit {_config_of(experiment, configs)}"
        )
    return steps[max(steps)]


def _config_of(experiment: str, folder: Path) -> str:
    """The file next to this one that names the experiment, for the hint."""
    line = re.compile(rf"^experiment:\s*[\"']?{re.escape(experiment)}[\"']?\s*(#.*)?$", re.M)
    for path in sorted(folder.glob("*.yaml")):
        if line.search(path.read_text(encoding="utf-8", errors="replace")):
            return str(path)
    return f"<the configuration of experiment {experiment}>"
