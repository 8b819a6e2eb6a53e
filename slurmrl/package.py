"""The files of this package, and the commit that it was built from.

In a trial's copy, modules, their bytecode and data are in an archive (`desk.copying` makes it).
Only `PROGRAMS` are plain files there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol, cast

import slurmrl

FOLDER: Final = Path(slurmrl.__file__).parent
ARCHIVE: Final = "modules.zip"
COMMIT_FILE: Final = "commit.txt"
"""File that the build of a wheel leaves in the package (see setup.py)."""
PROGRAMS: Final = ("rollouts/generation/launch_sglang.py", "rollouts/generation/warden.py")
"""Programs that Python runs by their path, without this package."""


class _Loader(Protocol):
    def get_data(self, path: str) -> bytes: ...


def read(name: str) -> bytes:
    """Return the content of a file, by its path in the package. Raises OSError."""
    assert __spec__ is not None
    return cast(_Loader, __spec__.loader).get_data(str(Path(__file__).parent / name))


def names(folder: str) -> list[str]:
    """Return the files of a folder of data, by their paths in the package. Raises OSError."""
    archive = FOLDER / ARCHIVE
    if not archive.exists():
        return [f"{folder}/{path.name}" for path in (FOLDER / folder).iterdir() if path.is_file()]
    from zipfile import ZipFile  # the import is slow and rarely needed

    with ZipFile(archive) as file:
        return [name for name in file.namelist() if name.rpartition("/")[0] == folder]


def program(name: str) -> Path:
    """Return the path of one of `PROGRAMS`."""
    assert name in PROGRAMS, f"{name} is not in PROGRAMS"
    return FOLDER / name


def built_commit() -> str:
    """Return the commit that an installed package was built from.

    ``+changes`` follows if the checkout had changes. The result is empty if the commit is unknown
    or the package is in a checkout, whose files may change.
    """
    try:
        return read(COMMIT_FILE).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
