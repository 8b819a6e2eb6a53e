"""The report that a trial leaves in its directory when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slurmrl import child, log
from slurmrl.config import source
from slurmrl.errors import SlurmrlError
from slurmrl.run.history.recent import recent
from slurmrl.run.history.record import Kind
from slurmrl.run.paths import RunPaths

logger = log.get(__name__)

WITHIN_S = 30.0
"""After this time the job ends without the report. That of 50,000 steps takes a few seconds."""


def write(paths: RunPaths, within_s: float = WITHIN_S) -> None:
    """Write ``report.html`` if the trial has finished or failed, unless `logging.report` is off. A
    report that fails or takes too long costs no more than this time."""
    try:
        end = recent(paths.history, exports=False).end
        if end is None or end.kind is Kind.CANCELLED or not _wanted(paths):
            return
        ended = _run(_command(paths), within_s)
    except (SlurmrlError, OSError) as error:
        ended = str(error)
    if ended:
        logger.warning("%s is not written: %s", paths.report, ended)


def _wanted(paths: RunPaths) -> bool:
    """Read only this setting: no other problem of the configuration matters here."""
    section = source.read(paths.config).values.get("logging")
    return not (isinstance(section, dict) and section.get("report") is False)


def _command(paths: RunPaths) -> list[str]:
    """A process of its own can be killed, whatever it waits for."""
    root = paths.run.parents[2]
    place = ["--root", str(root), "--output", str(paths.report)]
    return [sys.executable, "-m", "slurmrl", "report", f"{paths.experiment}/{paths.trial}", *place]


def _run(command: Sequence[str], within_s: float) -> str:
    """Return why it failed; empty if it did not. Its errors go to this process's output."""
    code = child.run(command, within_s, shown=True).code
    if code is None:
        return f"it took longer than {within_s:.0f} s"
    return f"slurmrl report exited with {code}" if code else ""
