"""The provenance record of a code snapshot: its origin and its environment.

Only the variables in RECORDED are kept, because run directories must not contain secret tokens. git
remotes are omitted for the same reason.

git runs without locks and without refreshing its index. Versions of packages come from metadata, so
that no package is imported.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, Final, NamedTuple

import slurmrl
from slurmrl import package
from slurmrl.config.schema import Config
from slurmrl.desk import copying
from slurmrl.desk.trial_code import OwnCode
from slurmrl.errors import SchedulerError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import REAL, write_new
from slurmrl.fsio.documents import TEXT, list_of
from slurmrl.plan.settings import ProfileUse
from slurmrl.scheduler.client import SlurmClient

RECORD_FILE: Final = "environment.json"
SUBMITTED_CONFIG: Final = "submitted.yaml"
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
GIT_TIMEOUT_S = 20.0
MOST_STATUS_BYTES = 256 * 2**10
MOST_DIFF_BYTES = 4 * 2**20


@dataclass(frozen=True)
class ProvenanceWriter:
    """Writes the record of one submission into a snapshot."""

    config: Config
    config_file: Path
    code: OwnCode
    scheduler: str
    profile: ProfileUse | None = None
    """The site profile that the configuration uses."""

    def __call__(self, folder: Path) -> None:
        values = {
            "time": time.time(),
            "host": socket.gethostname(),
            "directory": os.getcwd(),
            "command": sys.argv,
            "slurmrl": slurmrl.__version__,
            "slurmrl_commit": package.built_commit(),
            **interpreter(),
            "slurm": _slurm_version() if self.scheduler == "slurm" else None,
            "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
            "code": [str(path) for path in self.code.paths],
            "folders": [str(path) for path in self.code.folders],
            "notes": list(self.code.notes),
            "profile": None if self.profile is None else self.profile.to_json(),
            "git": dict(self._repositories(folder)),
            "packages": installed_packages(),
        }
        copying.copy(self.config_file, folder / SUBMITTED_CONFIG)
        record = (json.dumps(values, indent=1) + "\n").encode()
        write_new(folder / RECORD_FILE, record, True, REAL)

    def _repositories(self, folder: Path) -> Iterator[tuple[str, Any]]:
        """Yield the repositories of the working directory and this package; write their diffs."""
        seen: dict[Path, str] = {}
        places = {"directory": Path.cwd(), "slurmrl": Path(slurmrl.__file__).parent}
        for name, place in places.items():
            repository = repository_of(place)
            if isinstance(repository, str):
                yield name, {"notes": [repository]}
            elif repository.root in seen:
                yield name, {"same_as": seen[repository.root]}
            else:
                seen[repository.root] = name
                if repository.diff:
                    write_new(folder / f"{name}.diff", repository.diff, True, REAL)
                repository.notes += self._copy_untracked(folder, repository)
                yield name, repository.to_json()

    def _copy_untracked(self, folder: Path, repository: Repository) -> list[str]:
        """Copy small files that the configuration names and git does not track."""
        notes = []
        for path in untracked_files(repository, _named_files(self.config)):
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
    """Return the folders that were searched for a snapshot's code; none without a record."""
    path = snapshot / RECORD_FILE
    try:
        values = documents.read(path, {"folders": list_of(TEXT)}, ("folders",))
    except FileNotFoundError:
        return []
    return [Path(folder) for folder in values["folders"]]


def _named_files(config: Config) -> list[Path]:
    """Return the data files that settings name."""
    paths = [Path(os.path.realpath(path)) for path in config.data_paths()]
    return [path for path in paths if not path.is_dir()]


def _slurm_version() -> str | None:
    try:
        return SlurmClient(timeout_s=SLURM_TIMEOUT_S).version()
    except SchedulerError:
        return None


@dataclass
class GitAnswer:
    """The output of one git command, perhaps truncated."""

    text: bytes
    note: str = ""
    failed: bool = False


@dataclass
class Repository:
    """A git work tree and its state."""

    root: Path
    commit: str
    """Id of the commit; empty before the first commit."""
    branch: str
    status: str
    diff: bytes
    """Changes since the commit, staged or not. Untracked files are only in ``status``."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "commit": self.commit,
            "branch": self.branch,
            "status": self.status.splitlines(),
            "diff_bytes": len(self.diff),
            "notes": self.notes,
        }


def repository_of(folder: Path) -> Repository | str:
    """Return the repository that contains a folder, or the reason why no repository was found."""
    root = _ask(folder, "rev-parse", "--show-toplevel")
    if root.failed:
        return root.note
    top = Path(os.fsdecode(root.text).rstrip("\n"))
    commit, branch = (
        _ask(top, "rev-parse", "--verify", "HEAD"),
        _ask(top, "branch", "--show-current"),
    )
    status = _ask(
        top, "status", "--porcelain=v1", "--untracked-files=normal", most=MOST_STATUS_BYTES
    )
    against = [] if commit.failed else ["HEAD"]
    options = ("--no-color", "--no-ext-diff", "--no-textconv")
    diff = _ask(top, "diff", *options, *against, "--", most=MOST_DIFF_BYTES)
    return Repository(
        root=top,
        commit="" if commit.failed else _text(commit),
        branch="" if branch.failed else _text(branch),
        status=status.text.decode(errors="replace"),
        diff=diff.text,
        notes=[answer.note for answer in (status, diff) if answer.note],
    )


def commit_of_package() -> str:
    """Return the commit of this slurmrl, with ``+changes`` if files differ; empty if unknown.

    Ignore a repository that only contains the environment in which slurmrl is installed.
    """
    if commit := package.built_commit():
        return commit
    repository = repository_of(package.FOLDER)
    if isinstance(repository, str) or repository.root != package.FOLDER.parent.resolve():
        return ""
    return repository.commit + ("+changes" if repository.diff else "")


def untracked_files(repository: Repository, paths: Iterable[Path]) -> list[Path]:
    """Return the files in the work tree that git does not track."""
    inside = [path for path in paths if path.is_file() and path.is_relative_to(repository.root)]
    if not inside:
        return []
    tracked = _ask(repository.root, "ls-files", "-z", "--", *map(str, inside))
    names = set(os.fsdecode(tracked.text).split("\0"))
    return [path for path in inside if str(path.relative_to(repository.root)) not in names]


def _text(answer: GitAnswer) -> str:
    return answer.text.decode(errors="replace").strip()


def _ask(folder: Path, *words: str, most: int = 2**20) -> GitAnswer:
    """Run one git command; truncate its output to ``most`` bytes, with a note."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *words]
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=GIT_TIMEOUT_S,
                check=False,
            )
        except FileNotFoundError:
            return GitAnswer(b"", "git is not installed", failed=True)
        except subprocess.TimeoutExpired:
            return GitAnswer(
                b"", f"git {words[0]} took more than {GIT_TIMEOUT_S:.0f} s", failed=True
            )
        if done.returncode != 0:
            errors = done.stderr.decode(errors="replace").strip().splitlines()
            reason = errors[0] if errors else "failed"
            return GitAnswer(b"", f"git {words[0]}: {reason}", failed=True)
        size = output.tell() or output.seek(0, os.SEEK_END)
        output.seek(0)
        note = f"git {words[0]}: truncated to {most} of {size} bytes" if size > most else ""
        return GitAnswer(output.read(most), note)


@cache
def installed_packages() -> dict[str, str]:
    """Return the versions of all installed distributions, sorted by name.

    If a name occurs twice, the first distribution on the path counts, like for imports.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        known = distribution.metadata  # Each access to `metadata` parses the file.
        if known["Name"]:  # A killed installation leaves no name.
            versions.setdefault(known["Name"], known["Version"])
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class TorchBuild(NamedTuple):
    version: str
    """Version with the suffix of the build, ``2.13.0+cu126``, even for builds from PyPI."""
    cuda: str | None
    """Version of CUDA, ``12.9``; None for a build without CUDA."""
    gpus: bool
    """Whether torch is built for GPUs of any vendor."""


def torch_build() -> TorchBuild | None:
    """Return facts about the installed torch without importing it; None if it is missing."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    try:
        known = run_path(str(file))
    except OSError:
        return None
    cuda = known.get("cuda")
    return TorchBuild(str(known["__version__"]), cuda, bool(cuda or known.get("hip")))


def interpreter() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
