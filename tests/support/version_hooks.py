"""Changes to processes that publish weight versions."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from slurmrl.tensors.weights import writer

DEADLY = ("4.1/part-1.json", "6.2/manifest.json")
"""Records whose writer is killed just before it writes: a rank whose part is on disk, and the
master when all parts are on disk."""


def processes_die_while_they_publish() -> None:
    write = writer.write_record

    def deadly(path: Path, record: Any, **options: Any) -> None:
        if f"{path.parent.name}/{path.name}" in DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, record, **options)

    writer.write_record = deadly
