"""What a bundle says of itself, and the names that its members may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Final

from slurmrl.fsio.shapes import COUNT, SIZE

MANIFEST: Final = "bundle.json"
CONFIG: Final = "config.yaml"
INPUTS: Final = "input-files"
WHEELS: Final = "wheel-files"
"""A dash keeps the folders apart from the user's modules, which lie beside them."""
FORMAT: Final = 1
MANIFEST_BYTES: Final = 64 << 20
MOST_FILES: Final = 200_000
LONGEST_NAME: Final = 1000


@dataclass(frozen=True)
class Member:
    """A file of a bundle."""

    name: str
    bytes: Annotated[int, SIZE]
    sha256: str


@dataclass(frozen=True)
class BundleManifest:
    slurmrl: str
    """The version that made the bundle."""
    files: tuple[Member, ...]
    format: Annotated[int, COUNT] = FORMAT

    @property
    def unpacked(self) -> tuple[Member, ...]:
        """What a trial needs: all but the wheels."""
        return tuple(one for one in self.files if not one.name.startswith(f"{WHEELS}/"))


def is_safe(name: str) -> bool:
    """Whether a name lies below the folder that a bundle is unpacked into, and is printable."""
    parts = PurePosixPath(name).parts
    return (
        0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and "\\" not in name
        and "/".join(parts) == name
        and not name.startswith("/")
        and ".." not in parts
        and all(len(part.encode()) <= 255 for part in parts)
    )
