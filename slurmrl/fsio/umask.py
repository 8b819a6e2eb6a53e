"""The umask of slurmrl's processes. It imports nothing heavy: the command line starts with it."""

from __future__ import annotations

import os

PRIVATE_UMASK = 0o077


def make_private() -> None:
    """Set a private umask for this process and its children: libraries create files, too."""
    os.umask(PRIVATE_UMASK)
