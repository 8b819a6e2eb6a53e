"""The files of a trial with rollout tasks, read by the formats in docs/protocols.md without code
of the package.

A new incarnation removes the control logs of older ones, and a commit removes samples that it does
not need. An `Archive` therefore keeps a hard link to each file.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Message = dict[str, Any]
KEPT = (
    "control/*.master*",
    "rollouts/*/results*",
    "rollouts/*/samples/*.samples",
    "checkpoints/step-*/state.json",
)
LOOK_S = 0.05
"""Seconds between two searches for new files."""


class Archive:
    """Links to the files of ``run`` in ``folder``, which is on the same file system."""

    def __init__(self, run: Path, folder: Path) -> None:
        self.run, self.folder = run, folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Archive:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Link the files that are there now. Leave out files that were removed again."""
        for pattern in KEPT:
            for file in self.run.glob(pattern):
                link = self.folder / file.relative_to(self.run)
                if not link.exists():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError, FileExistsError):
                        os.link(file, link)

    def _follow(self) -> None:
        """Search for new files until the end, with a higher priority than other processes have,
        because missed files cannot be checked later.
        """
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        while not self._over.wait(LOOK_S):
            with suppress(FileNotFoundError):  # A directory may be removed.
                self.look()


def messages(log: Path) -> Iterator[Message]:
    """Return the messages of a log from all its files."""
    number = 0
    while log.exists():
        following = None
        for message in _frames(log.read_bytes()):
            own = message.get("$log")
            if own is None:
                yield message
            else:
                following = own.get("next")
        if following is None:
            return
        number = following
        log = log.with_name(f"{log.name.partition('~')[0]}~{number}")


def _frames(data: bytes) -> Iterator[Message]:
    """Return the complete frames: SRL1, a length, a CRC-32, and the JSON."""
    start = 0
    while start + 12 <= len(data):
        magic, size, crc = struct.unpack_from("<4sII", data, start)
        body = data[start + 12 : start + 12 + size]
        if magic != b"SRL1" or zlib.crc32(data[start + 4 : start + 8] + body) != crc:
            return
        yield json.loads(body)
        start += 12 + size


@dataclass(frozen=True)
class Group:
    """A group of samples in the form of its file."""

    item: int
    lease: str
    tokens: tuple[str, ...]
    """The weight version of each token that the policy sampled."""


def read_group(data: bytes) -> Group:
    """Read a safetensors file: the size of the header, the header, the arrays."""
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    own = json.loads(header["__metadata__"]["group"])
    first, last = header["drawn_by"]["data_offsets"]
    drawn_by = np.frombuffer(data[8 + size :][first:last], "<i4")
    tokens = tuple(own["versions"][place] for place in drawn_by if place >= 0)
    return Group(own["item"], own["lease"], tokens)


def history(run: Path) -> list[Message]:
    """Return the records by slot."""
    return [json.loads(file.read_bytes()) for file in sorted((run / "history").glob("[0-9]*"))]


def metrics(run: Path) -> list[Message]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
