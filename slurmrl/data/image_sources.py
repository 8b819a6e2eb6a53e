"""The files from which prepared rows were made: files of rows, and the images that rows name.

Prepared rows with images have the file `IMAGES`, which lists the images. Torch-free.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

from slurmrl.data.source_files import fingerprint_of, state_of, state_of_one, unreadable
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls, corrupt
from slurmrl.fsio.documents import TEXT

T = TypeVar("T")
IMAGES: Final = "images.json"
LARGEST_LIST: Final = 2**30
HALF: Final = 32
"""Number of leading characters of a `Sources` fingerprint that depend only on the files of rows."""
GONE: Final = "gone"
"""State and fingerprint of a set of images if one of them no longer exists."""


class ImageFiles:
    """Records the images of a dataset while they are read."""

    def __init__(self) -> None:
        self._states: list[str] = []
        self._listed: dict[str, str] = {}

    def read(self, base: Path, image: str) -> bytes:
        """Return the content of an image, whose path is relative to ``base``. Raises OSError."""
        path = base / image
        state = state_of_one(path.stat())
        content = path.read_bytes()
        if image not in self._listed:
            self._states.append(state)
            self._listed[image] = _hash(content)
        return content

    def state(self, rows: str) -> str:
        """Return `Sources.state`; ``rows`` is the state of the files of rows."""
        return _with_images(rows, self._states)

    def fingerprint(self, rows: str) -> str:
        """Return `Sources.fingerprint`; ``rows`` is the fingerprint of the files of rows."""
        return rows + _hash("".join(self._listed.values()).encode())

    def write(self, directory: Path, *, calls: SystemCalls = REAL) -> None:
        """Write the list into prepared data. Raises EnvironmentFailure."""
        text = json.dumps({"images": self._listed}, indent=0)
        atomic.replace(directory / IMAGES, text.encode(), calls=calls)


def images_of(directory: Path, *, calls: SystemCalls = REAL) -> Mapping[str, str]:
    """Return a mapping from an image's path in the rows to the hash of its content.

    Raises CorruptFileError if the list is missing or damaged, and EnvironmentFailure.
    """
    path = directory / IMAGES
    try:
        content = atomic.read(path, calls=calls, limit_bytes=LARGEST_LIST)
    except FileNotFoundError as error:
        raise corrupt(path, "is missing") from error
    fields = {"images": documents.each(TEXT)}
    found: Mapping[str, str] = documents.parse(content, path, fields, fields)["images"]
    return found


@dataclass(frozen=True)
class Sources:
    """Files of rows, and the images that they name.

    Methods raise EnvironmentFailure if a file cannot be read.
    """

    files: Sequence[Path]
    base: Path
    """Folder to which paths of images are relative."""
    images: Mapping[str, str] | None = None
    """Hash of each image's content by path (`images_of`); None for a dataset without images."""

    def state(self) -> str:
        """Return `state_of` the files, followed by one size and one hash for all images.

        Return "" if a file was changed so recently that another change may not change the state.
        """
        rows = state_of(self.files)
        if self.images is None:
            return rows
        states = self._of_images(lambda path: state_of_one(path.stat()))
        return GONE if states is None else _with_images(rows, states)

    def sizes(self) -> list[int]:
        """Return the bytes of each file, followed by the bytes of all images."""
        sizes = [path.stat().st_size for path in self.files]
        if self.images is None:
            return sizes
        found = self._of_images(lambda path: path.stat().st_size)
        return [*sizes, -1 if found is None else sum(found)]

    def fingerprint(self, progress: Callable[[float], None]) -> str:
        """Return `fingerprint_of` the files, followed by a fingerprint of all images.

        ``progress`` receives the share of the files, and then of the images, that has been read.
        """
        rows = fingerprint_of(self.files, progress)
        if self.images is None:
            return rows
        read = iter(range(1, len(self.images) + 1))

        def content(path: Path) -> str:
            progress(next(read) / len(self.images or ()))
            return _read_hash(path)

        found = self._of_images(content)
        return rows + (GONE if found is None else _hash("".join(found).encode()))

    def changed_image(self) -> str:
        """Return the first image whose content differs from the list; "" if none differs."""
        for image, content in (self.images or {}).items():
            if Sources((), self.base, {image: content})._of_images(_read_hash) != [content]:
                return image
        return ""

    def _of_images(self, read: Callable[[Path], T]) -> list[T] | None:
        """Return the result of ``read`` for each image; None if an image does not exist."""
        found = []
        for image in self.images or ():
            try:
                found.append(read(self.base / image))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    return None
                raise unreadable(self.base / image, error) from error
        return found


def _with_images(rows: str, states: Sequence[str]) -> str:
    if not rows or not all(states):
        return ""
    size = sum(int(state.split()[0]) for state in states)
    return f"{rows} {size} {_hash(' '.join(states).encode())} {len(states)}"


def _read_hash(path: Path) -> str:
    return _hash(path.read_bytes())


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
