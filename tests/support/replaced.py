"""Replace a file or folder of a run by another kind of file, like users or faulty programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

KINDS: Final = ("folder", "file", "fifo", "link", "foreign")


def needs_root(kind: str) -> bool:
    return kind == "foreign"


def replace(path: Path, kind: str) -> None:
    """Replace a file or folder: by a ``file`` with other content, a ``link`` without a target, or a
    ``foreign`` private file of another user.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "link":
        path.symlink_to("/nonexistent/file")
    else:
        path.write_bytes(b"other content\n")
        path.chmod(0o600)
        if kind == "foreign":
            os.chown(path, 65534, 65534)
