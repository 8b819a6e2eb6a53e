"""The files of a bundle, and its configuration."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML

from slurmrl.config.load import paths_in
from slurmrl.config.schema.model import TRIAL_PREFIX
from slurmrl.config.source import KeyPath, Source, dotted
from slurmrl.desk import copying
from slurmrl.desk.bundle.manifest import CONFIG, INPUTS, MANIFEST, WHEELS, is_safe
from slurmrl.desk.own_code import OwnCode
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.settings import Settings

LEFT_ALONE = (("cluster", "variables_file"),)
"""Secrets."""
HEADER = "# Made by slurmrl bundle. Relative paths are files of the bundle.\n"


@dataclass(frozen=True)
class Contents:
    config: bytes
    files: Mapping[str, Path]
    """By their names in the bundle, which ascend."""
    notes: tuple[str, ...]
    """What the cluster must have itself."""


def collect(
    settings: Settings, code: OwnCode, elsewhere: Mapping[KeyPath, str] | None = None
) -> Contents:
    """Find what a configuration names.

    ``elsewhere`` are settings that name what only the cluster has. Raises ConfigError for what a
    bundle cannot hold.
    """
    config, source = settings.config, settings.source
    values = _without_profile(source)
    files, notes, problems = _Files(), [*code.notes], []
    left = dict(elsewhere or {})
    for path in code.paths:
        files.add(path.name, path)
    if config.code:
        values["code"] = [Path(path).name for path in config.code]
    for key, text in paths_in(config):
        written = _at(values, key)
        if key[0] == "code" or not isinstance(written, str) or not written:
            continue  # nothing, or a default that follows from other paths
        if written.startswith(TRIAL_PREFIX):
            problems.append(source.problem(key, _of_trial(written)))
        elif key in LEFT_ALONE:
            left[key] = text
        else:
            name = files.add(f"{INPUTS}/{dotted(key)}/{Path(text).name}", Path(text))
            _at(values, key[:-1])[key[-1]] = name
    if problems:
        raise ConfigError(tuple(problems))
    for key, text in left.items():
        notes.append(f"{dotted(key)}: {text} is not in the bundle; the cluster must have it")
        _at(values, key[:-1])[key[-1]] = text
    for key in config.datasets():
        _forget_subsets(_at(values, key))
    if source.of_profile():
        notes.append(f"{source.profile} is not in the bundle: the cluster's own profile applies")
    if values.pop("root", None) is not None:
        notes.append("root is not in the bundle: give --root or SLURMRL_ROOT on the cluster")
    return Contents(_text(values), dict(sorted(files.found.items())), tuple(notes))


class _Files:
    """The files of a bundle by their names."""

    def __init__(self) -> None:
        self.found: dict[str, Path] = {}
        self._names: dict[Path, str] = {}

    def add(self, name: str, source: Path) -> str:
        """Add a file, or those of a folder, and return the name.

        What is there already, such as the model of two roles, is added once. Raises UsageError.
        """
        if source in self._names:
            return self._names[source]
        if name in (CONFIG, MANIFEST, INPUTS, WHEELS):
            raise UsageError(f"{source}: a bundle has a {name} of its own; rename this one")
        new = {str(PurePosixPath(name) / part): path for part, path in copying.files(source)}
        if not new:
            raise UsageError(f"{source}: the folder has no files")
        if unsafe := [path for named, path in new.items() if not is_safe(named)]:
            raise UsageError(f"{str(unsafe[0])!r}: a bundle cannot hold a file of this name")
        if taken := new.keys() & self.found.keys():
            raise UsageError(f"{source} and {self.found[taken.pop()]} have the same name")
        self.found |= new
        self._names[source] = name
        return name


def _of_trial(text: str) -> str:
    name = text.removeprefix(TRIAL_PREFIX).partition("@")[0]
    return (
        f"'{text}' is a trial of this machine, which a bundle cannot name; slurmrl export {name} "
        "writes a folder, which it can"
    )


def _at(values: Any, key: KeyPath) -> Any:
    """The value at a key; None where the file has none."""
    for part in key:
        if not isinstance(values, dict) or part not in values:
            return None
        values = values[part]
    return values


def _without_profile(source: Source) -> dict[str, Any]:
    """The values without those of the site profile, which are about this machine's cluster."""
    values = copy.deepcopy(source.values)
    for key in source.of_profile():
        del _at(values, key[:-1])[key[-1]]
        for section in (key[:length] for length in range(len(key) - 1, 0, -1)):
            if not _at(values, section) and source.is_of_profile(section):
                del _at(values, section[:-1])[section[-1]]
    return values


def _forget_subsets(dataset: Any) -> None:
    """What was fetched of the hub is the subset alone, and local files have none."""
    if isinstance(dataset, dict):
        dataset.pop("subset", None)
        for part in (dataset.get("sources") or {}).values():
            part.pop("subset", None)


def _text(values: dict[str, Any]) -> bytes:
    stream = io.StringIO()
    yaml = YAML(pure=True)
    yaml.width = 100
    yaml.dump(values, stream)
    return (HEADER + stream.getvalue()).encode()
