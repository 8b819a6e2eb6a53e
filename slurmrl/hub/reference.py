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
        """The folder of a commit. It is there only as a whole."""
        return self.home(cache) / commit

    def mark(self, cache: Path, commit: str) -> Path:
        """An empty file which says that the revision has been this commit."""
        return self.home(cache) / "revisions" / quote(self.revision, safe="") / commit

    def commits(self, cache: Path) -> Sequence[str]:
        """The commits in the cache that the revision has been, the newest first."""
        if COMMIT.fullmatch(self.revision):
            known = [self.revision]
        else:
            marks = self.mark(cache, "").parent / quote(self.revision, safe="")
            try:
                files = sorted(marks.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            except FileNotFoundError:
                files = []
            known = [path.name for path in reversed(files) if COMMIT.fullmatch(path.name)]
        return [commit for commit in known if self.folder(cache, commit).is_dir()]


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
    """Whether a text is a repository, ``org/name``: its ``path`` does not exist, nor the folder
    ``org``."""
    named = _PLAIN.fullmatch(text) is not None and not text.endswith(_FILES)
    return named and not path.exists() and not path.parent.is_dir()
