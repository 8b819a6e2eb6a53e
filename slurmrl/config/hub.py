"""Datasets, models and tokenizers of the Hugging Face hub, fetched on the login node.

A reference (``hf://org/name@revision``) becomes a folder in a cache under the root of the runs. The
folder has one commit of the repository. Later trials and jobs read the folder without network
access. The hub's own library runs in a child process (`hub_child`). Torch-free.

A file list is next to the folder. `damage` compares folder and list to detect lost files: some file
systems remove old files one by one, and people remove folders that look unused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import quote

import slurmrl
from slurmrl import log
from slurmrl.child import ChildRequest
from slurmrl.env import user_name
from slurmrl.errors import CorruptFileError, EnvironmentFailure, UnreachableHubError, UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import SIZE, Fields, each

PREFIX: Final = "hf://"
CACHE: Final = ".hub"
"""Folder of the cache, next to the experiments' folders, whose names do not begin with a dot."""
DEFAULT_REVISION: Final = "main"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REPOSITORY: Final = re.compile(rf"(?:{_NAME}/)?{_NAME}")
_REVISION: Final = re.compile(r"[\w][\w./+-]{0,199}", re.ASCII)
_PLAIN: Final = re.compile(rf"{_NAME}/{_NAME}(?:@[\w./+-]+)?")
_FILES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".txt", ".jinja")


class HubKind(StrEnum):
    """The kind of a repository, which is also the name of its folder in the cache."""

    DATASET = "datasets"
    MODEL = "models"
    TOKENIZER = "tokenizers"
    """The tokenizer and the architecture of a model, without its weights."""


@dataclass(frozen=True)
class HubReference:
    kind: HubKind
    repository: str
    """Name of the repository: ``org/name``."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""
    subset: str | None = None
    """Subset of a dataset that has several subsets."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}@{self.revision}"

    def home(self, cache: Path) -> Path:
        """Return the folder of the repository in a cache."""
        name = self.repository.replace("/", "--")
        if self.subset is not None:
            name = f"{name}--{quote(self.subset, safe=' ')}"
        return cache / self.kind / name

    def folder(self, cache: Path, commit: str) -> Path:
        """Return the folder of a commit, which a rename puts in place when it is complete."""
        return self.home(cache) / commit

    def mark(self, cache: Path, commit: str) -> Path:
        """Return the path of the empty file that records this commit of the revision."""
        return self.home(cache) / "revisions" / quote(self.revision, safe="") / commit

    def commits(self, cache: Path) -> Sequence[str]:
        """Return the recorded commits of the revision, newest first."""
        if self.is_commit:
            return [self.revision]
        marks = self.mark(cache, "").parent / quote(self.revision, safe="")
        try:
            files = sorted(marks.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        except FileNotFoundError:
            return []
        return [path.name for path in reversed(files) if COMMIT.fullmatch(path.name)]

    @property
    def is_commit(self) -> bool:
        return COMMIT.fullmatch(self.revision) is not None


def of_folder(folder: Path, cache: Path, subset: str | None = None) -> HubReference | None:
    """Return a reference to the commit in a folder of the cache; None for any other folder.

    ``subset`` is the subset of a dataset that has several subsets.
    """
    parts = folder.relative_to(cache).parts if folder.is_relative_to(cache) else ()
    if len(parts) != 3 or parts[0] not in [*HubKind] or not COMMIT.fullmatch(parts[2]):
        return None
    kind, home, commit = parts
    name = home.removesuffix(f"--{quote(subset, safe=' ')}") if subset is not None else home
    reference = HubReference(HubKind(kind), name.replace("--", "/"), commit, subset)
    named = _REPOSITORY.fullmatch(reference.repository) and reference.home(cache).name == home
    return reference if named else None


def parse(text: str, kind: HubKind, subset: str | None = None) -> HubReference:
    """Parse ``hf://[datasets/]org/name[@revision]``. Raises UsageError."""
    rest = text.removeprefix(PREFIX).removeprefix(
        "datasets/" if kind is HubKind.DATASET else "models/"
    )
    repository, at, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(f"'{text}' is not allowed: expected {PREFIX}org/name[@revision]")
    return HubReference(kind, repository, revision or DEFAULT_REVISION, subset)


def is_plain(text: str, path: Path) -> bool:
    """Return whether a string is ``org/name``, and neither ``path`` nor its folder exists."""
    named = _PLAIN.fullmatch(text) is not None and not text.endswith(_FILES)
    return named and not path.exists() and not path.parent.is_dir()


FIELDS: Final[Fields] = {"files": each(SIZE)}
"""Fields of a folder's file list, which maps relative paths to sizes in bytes."""


def list_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def record(made: Path, folder: Path) -> None:
    """Write the list of the files in the new folder ``made``, which will move to ``folder``.

    Raises EnvironmentFailure.
    """
    files = (path for path in sorted(made.rglob("*")) if path.is_file())
    sizes = {str(path.relative_to(made)): path.stat().st_size for path in files}
    atomic.replace(list_file(folder), json.dumps({"files": sizes}).encode())


def damage(folder: Path) -> str:
    """Return the defect of a folder, as the end of a sentence; empty for a complete folder.

    Raises EnvironmentFailure if the list of its files cannot be read.
    """
    if not folder.is_dir():
        return "is missing"
    try:
        files = documents.read(list_file(folder), FIELDS, FIELDS)["files"]
    except (FileNotFoundError, CorruptFileError):
        return f"cannot be checked: {list_file(folder).name} next to it is missing or damaged"
    lost = [name for name, size in files.items() if _size(folder / name) != size]
    if not lost:
        return ""
    more = f" and {len(lost) - 1} more files are" if len(lost) > 1 else " is"
    return f"is incomplete: {lost[0]}{more} missing or truncated"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


logger = log.get(__name__)

CHILD: Final = "slurmrl.config.hub_child"


class HubCache:
    """The cache of one user under the root of the runs.

    Methods raise UsageError for a repository that cannot be fetched, EnvironmentFailure if the
    cache cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / user_name() / CACHE

    def pinned(self, reference: HubReference, before: str | None) -> HubReference:
        """Return the reference to the commit in ``before``, the folder that a trial has used.

        If the cache does not record that the revision meant this commit, return ``reference``.
        """
        for commit in reference.commits(self.folder):
            if str(reference.folder(self.folder, commit)) == before:
                return replace(reference, revision=commit)
        return reference

    def newest(self, reference: HubReference) -> Path | None:
        """Return the newest complete folder of the revision in the cache, or None."""
        commits = reference.commits(self.folder)
        folders = (reference.folder(self.folder, commit) for commit in commits)
        return next((folder for folder in folders if not damage(folder)), None)

    def fetch(self, reference: HubReference) -> Path:
        """Return the folder of the commit that the revision means on the hub now.

        Fetch a commit once, and again if its folder has lost files. If the hub cannot be reached,
        return the folder of the last fetched commit.
        """
        known = self.newest(reference)
        if known is not None and reference.is_commit:
            return known
        try:
            return self._ask(reference)
        except UnreachableHubError as error:
            if known is None:
                raise
            logger.warning("%s; using the fetched commit of %s: %s", error, reference, known.name)
            return known

    def _ask(self, reference: HubReference) -> Path:
        atomic.make_private_directory(self.folder)
        home = reference.home(self.folder)
        request = ChildRequest(
            CHILD, {**asdict(reference), "home": str(home)}, env=_environment(home), shown=True
        )
        reply = request.last()
        if "unreachable" in reply:
            raise UnreachableHubError(reply["unreachable"])
        if "error" in reply:
            raise UsageError(reply["error"])
        if "commit" not in reply:
            message = f"fetching {reference} failed, see above (exit code {request.ended.code})"
            raise EnvironmentFailure(message)
        folder = reference.folder(self.folder, reply["commit"])
        if not reference.is_commit:
            mark = reference.mark(self.folder, reply["commit"])
            atomic.make_private_directory(mark.parent)
            atomic.replace(mark, b"")
        return folder


def _environment(home: Path) -> dict[str, str]:
    """Return the user's environment, from which the hub's library takes the token.

    Variables make the library write only to the cache, because a home directory may be small.
    """
    place = home / "fetching"
    return {
        **os.environ,
        "PYTHONPATH": str(Path(slurmrl.__file__).parents[1]),
        "HF_HUB_CACHE": str(place / "hub"),
        "HF_XET_CACHE": str(place / "xet"),
        "HF_ASSETS_CACHE": str(place / "assets"),
        "HF_DATASETS_CACHE": str(place / "datasets"),
        "HF_MODULES_CACHE": str(place / "modules"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    }
