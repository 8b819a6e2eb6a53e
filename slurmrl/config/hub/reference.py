"""What a configuration says of a repository of the hub, and the folders of the cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import quote

from slurmrl.errors import UsageError

PREFIX: Final = "hf://"
CACHE: Final = ".hub"
"""Folder of the cache, beside those of experiments (whose names do not begin with a dot)."""
DEFAULT_REVISION: Final = "main"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_REPOSITORY: Final = re.compile(rf"(?:{_NAME}/)?{_NAME}")
_REVISION: Final = re.compile(r"[\w][\w./+-]{0,199}", re.ASCII)
_PLAIN: Final = re.compile(rf"{_NAME}/{_NAME}(?:@[\w./+-]+)?")
_FILES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".txt", ".jinja")


class HubKind(StrEnum):
    """What is fetched of a repository; also the folder of the cache."""

    DATASET = "datasets"
    MODEL = "models"
    TOKENIZER = "tokenizers"
    """The tokenizer, and the architecture of a model."""


@dataclass(frozen=True)
class HubReference:
    kind: HubKind
    repository: str
    """``org/name``."""
    revision: str = DEFAULT_REVISION
    """A branch, a tag or a commit."""
    subset: str | None = None
    """Of a dataset that has several."""

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}@{self.revision}"

    def home(self, cache: Path) -> Path:
        """The folder of the repository in a cache."""
        name = self.repository.replace("/", "--")
        if self.subset is not None:
            name = f"{name}--{quote(self.subset, safe=' ')}"
        return cache / self.kind / name

    def folder(self, cache: Path, commit: str) -> Path:
        """The folder of a commit. It is made as a whole (see `contents`)."""
        return self.home(cache) / commit

    def mark(self, cache: Path, commit: str) -> Path:
        """An empty file which says that the revision has been this commit."""
        return self.home(cache) / "revisions" / quote(self.revision, safe="") / commit

    def commits(self, cache: Path) -> Sequence[str]:
        """The commits that the revision is known to have been, the newest first."""
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
    """The reference by commit whose folder in a cache this is; ``subset`` is that of a dataset.

    None for any other folder.
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
    """The reference in ``hf://[datasets/]org/name[@revision]``. Raises UsageError."""
    rest = text.removeprefix(PREFIX).removeprefix(
        "datasets/" if kind is HubKind.DATASET else "models/"
    )
    repository, at, revision = rest.partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(f"'{text}' is not allowed: expected {PREFIX}org/name[@revision]")
    return HubReference(kind, repository, revision or DEFAULT_REVISION, subset)


def is_plain(text: str, path: Path) -> bool:
    """Return whether a string is a repository ``org/name``: neither ``path`` nor ``org`` exists."""
    named = _PLAIN.fullmatch(text) is not None and not text.endswith(_FILES)
    return named and not path.exists() and not path.parent.is_dir()
