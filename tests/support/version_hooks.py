"""Changes to processes that publish weight versions."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from slurmrl.tensors.weights import writer

DEADLY = ("4.1/part-1.json", "6.2/manifest.json")
"""Records before which the process is killed that is about to write them: a rank with its part on
disk, and the master with all parts there."""


def processes_die_while_they_publish() -> None:
    write = writer.write_record

    def deadly(path: Path, record: Any, **options: Any) -> None:
        if f"{path.parent.name}/{path.name}" in DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, record, **options)

    writer.write_record = deadly
