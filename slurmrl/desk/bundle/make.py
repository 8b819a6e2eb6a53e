"""From a configuration to a bundle."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurmrl.config.load import load
from slurmrl.config.profiles import expanded
from slurmrl.config.source import KeyPath, Source, dotted
from slurmrl.desk import own_code, trials
from slurmrl.desk.bundle import wheels
from slurmrl.desk.bundle.contents import collect
from slurmrl.desk.bundle.pack import pack
from slurmrl.errors import UsageError
from slurmrl.plan.settings import load_settings

OF_CLUSTER: Final[Mapping[KeyPath, str]] = {
    ("rollout", "python"): sys.executable,
    ("rollout", "server_keys"): "",
    ("rollout", "server_weights"): "",
}
"""What servers of the cluster are started with and read, which need not be here; and the values
that the configuration is checked with instead."""


@dataclass(frozen=True)
class Made:
    file: Path
    files: int
    notes: tuple[str, ...]


def make_bundle(
    config: Path,
    overrides: Sequence[str],
    *,
    root: str | None,
    output: Path | None,
    packages: tuple[str, str] | None,
) -> Made:
    """Check a configuration as `submit` does, and write the bundle.

    ``packages``: the Python and the build of torch to add wheels for. Raises ConfigError,
    UsageError, EnvironmentFailure.
    """
    source = load(config, overrides)
    elsewhere = _elsewhere(source)
    stand_ins = [f"{dotted(key)}={OF_CLUSTER[key]}" for key in elsewhere]
    stand_ins += ["root=."] if source.writes("root") else []  # its variables are the cluster's
    settings = load_settings(config, [*overrides, *stand_ins], root=trials.chosen_root(root))
    code = own_code.find(settings.config, settings.source, settings.folders, settings.algorithm)
    contents = collect(settings, code, elsewhere)
    extras = wheels.extras_of(settings.config, contents.files)
    file = output or Path(f"{settings.config.experiment}-{settings.config.trial}.tar")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--output {file}: there is no folder {file.parent}")
    with tempfile.TemporaryDirectory(prefix="slurmrl-wheels-") as made:
        found: list[Path] = []
        if packages is not None:
            python, torch = packages
            folder = Path(made) / "wheels"
            found = wheels.gather(folder, python=python, torch=torch, extras=extras)
        manifest = pack(contents, found, file.absolute())
    return Made(file, len(manifest.files), (*contents.notes, *_note(extras)))


def _note(extras: Sequence[str]) -> Iterator[str]:
    if extras:
        yield f"on the cluster, install slurmrl[{','.join(extras)}] in place of slurmrl"


def _elsewhere(source: Source) -> dict[KeyPath, str]:
    """The settings of `OF_CLUSTER` that a configuration has, with absolute paths."""
    found = {}
    for key in OF_CLUSTER:
        text = source.at(key) if source.writes(*key) else None
        if isinstance(text, str):
            found[key] = os.path.abspath(source.folder(key) / expanded(text))
    return found
