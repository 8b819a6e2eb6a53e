"""Checksums of a checkpoint's files, as ``<kind>:<hex digits>``.

They find damage, not forgery: the manifest lies beside the files. XXH3 takes a tenth of the CPU
time of writing; SHA-256, which older checkpoints have, takes twice that of writing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from io import BufferedIOBase
from typing import Any, Final

KIND: Final = "xxh3_128"
"""The kind of new checksums."""
BUFFER_BYTES = 2**18
"""Read at a time: few enough to be in a core's cache when they are digested."""


def _xxh3_128() -> Any:
    import xxhash  # commands that verify nothing start without it

    return xxhash.xxh3_128()


_KINDS: Final[dict[str, Callable[[], Any]]] = {KIND: _xxh3_128, "sha256": hashlib.sha256}


class Checksum:
    """The checksum of bytes that come in parts."""

    def __init__(self, kind: str = KIND) -> None:
        self._kind = kind
        self._digest = _KINDS[kind]()

    def update(self, data: bytes | memoryview) -> None:
        self._digest.update(data)

    def __str__(self) -> str:
        return f"{self._kind}:{self._digest.hexdigest()}"


def kind_of(checksum: str) -> str | None:
    """The kind of a checksum; None if it is unknown."""
    kind = checksum.partition(":")[0]
    return kind if kind in _KINDS else None


def checksum(file: BufferedIOBase, kind: str = KIND) -> str:
    """The checksum of a file's bytes, from its position."""
    found = Checksum(kind)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while count := file.readinto(buffer):
        found.update(buffer[:count])
    return str(found)
