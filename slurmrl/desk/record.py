"""The provenance record of a code snapshot: its origin and its environment.

Only the variables in RECORDED are kept, because tokens must not get into run directories. git
remotes are left out for the same reason.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import slurmrl
from slurmrl import version
from slurmrl.config.schema import Config
from slurmrl.desk import copying, git, versions
from slurmrl.desk.own_code import OwnCode
from slurmrl.errors import SchedulerError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.primitives import write_new
from slurmrl.fsio.shapes import TEXT, list_of
from slurmrl.plan.settings import ProfileUse
from slurmrl.scheduler.client import SlurmClient

FILE: Final = "environment.json"
CONFIG: Final = "submitted.yaml"
UNTRACKED: Final = "untracked-files"
RECORDED: Final = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_DEFAULT_ENV",
    "CUDA_HOME",
    "LOADEDMODULES",
    "SLURM_CONF",
    "SLURMRL_ROOT",
    "LANG",
)
MOST_UNTRACKED_BYTES: Final = 2**20
SLURM_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class ProvenanceWriter:
    """Writes the record of one submission into a snapshot."""

    config: Config
    config_file: Path
    code: OwnCode
    scheduler: str
    profile: ProfileUse | None = None
    """The site profile, whose settings the recorded configuration has."""

    def __call__(self, folder: Path) -> None:
        values = {
            "time": time.time(),
            "host": socket.gethostname(),
            "directory": os.getcwd(),
            "command": sys.argv,
            "slurmrl": slurmrl.__version__,
            "slurmrl_commit": version.built_commit(),
            **versions.interpreter(),
            "slurm": _slurm_version() if self.scheduler == "slurm" else None,
            "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
            "code": [str(path) for path in self.code.paths],
            "folders": [str(path) for path in self.code.folders],
            "notes": list(self.code.notes),
            "profile": None if self.profile is None else self.profile.to_json(),
            "git": dict(self._repositories(folder)),
            "packages": versions.packages(),
        }
        copying.copy(self.config_file, folder / CONFIG)
        _write(folder / FILE, (json.dumps(values, indent=1) + "\n").encode())

    def _repositories(self, folder: Path) -> Iterator[tuple[str, Any]]:
        """Yield the repositories of the working directory and this package; write their diffs."""
        seen: dict[Path, str] = {}
        places = {"directory": Path.cwd(), "slurmrl": Path(slurmrl.__file__).parent}
        for name, place in places.items():
            repository = git.look(place)
            if isinstance(repository, str):
                yield name, {"notes": [repository]}
            elif repository.root in seen:
                yield name, {"same_as": seen[repository.root]}
            else:
                seen[repository.root] = name
                if repository.diff:
                    _write(folder / f"{name}.diff", repository.diff)
                repository.notes += self._copy_untracked(folder, repository)
                yield name, repository.to_json()

    def _copy_untracked(self, folder: Path, repository: git.Repository) -> list[str]:
        """Copy small files that the configuration names and git does not track."""
        notes = []
        for path in git.untracked(repository, _named_files(self.config)):
            size = path.stat().st_size
            relative = path.relative_to(repository.root)
            if size > MOST_UNTRACKED_BYTES:
                notes.append(
                    f"{relative} is not tracked by git, and too large ({size} bytes) to be copied"
                )
            elif not (target := folder / UNTRACKED / relative).exists():
                copying.copy(path, target)
        return notes


def recorded_folders(snapshot: Path) -> list[Path]:
    """Return the folders searched for the code of a snapshot; none without a record."""
    path = snapshot / FILE
    try:
        values = documents.read(path, {"folders": list_of(TEXT)}, ("folders",))
    except FileNotFoundError:
        return []
    return [Path(folder) for folder in values["folders"]]


def _named_files(config: Config) -> list[Path]:
    """Return the files that settings name and that are not copied as code."""
    paths = [Path(os.path.realpath(path)) for path in config.data_paths()]
    return [path for path in paths if not path.is_dir()]


def _slurm_version() -> str | None:
    try:
        return SlurmClient(timeout_s=SLURM_TIMEOUT_S).version()
    except SchedulerError:
        return None


def _write(path: Path, data: bytes) -> None:
    write_new(path, data, True, REAL)
