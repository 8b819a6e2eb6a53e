"""From a configuration to a bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmrl.errors import UsageError
from slurmrl.plan.settings import load_settings
from slurmrl.submission import own_code, trials
from slurmrl.submission.bundle import wheels
from slurmrl.submission.bundle.contents import collect
from slurmrl.submission.bundle.pack import pack


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
    """Check a configuration as `submit` does, and write the bundle. ``packages``: the Python and
    the build of torch to add wheels for. Raises ConfigError, UsageError, EnvironmentFailure."""
    settings = load_settings(config, overrides, root=trials.chosen_root(root))
    code = own_code.find(settings.config, settings.source, settings.folders, settings.algorithm)
    contents = collect(settings, code)
    file = output or Path(f"{settings.config.experiment}-{settings.config.trial}.tar")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--output {file}: there is no folder {file.parent}")
    with tempfile.TemporaryDirectory(prefix="slurmrl-wheels-") as made:
        found: list[Path] = []
        if packages is not None:
            python, torch = packages
            found = wheels.gather(Path(made) / "wheels", python=python, torch=torch)
        manifest = pack(contents, found, file.absolute())
    return Made(file, len(manifest.files), contents.notes)
