"""The version of this slurmrl, and the commit that it was made from."""

from __future__ import annotations

from typing import Final

from slurmrl import package

COMMIT_FILE: Final = "commit.txt"
"""File that the build of a wheel leaves in the package (see setup.py)."""


def built_commit() -> str:
    """Return the commit that an installed package was built from.

    ``+changes`` follows if the checkout had changes. The result is empty if the commit is unknown,
    and in a checkout, which may change.
    """
    try:
        return package.read(COMMIT_FILE).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
