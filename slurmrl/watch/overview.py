"""``overview.json``: what a list of trials says about a trial that has ended.

It saves a reader work and is never the truth. It names the number of history records and the size
of the metrics that it was made from. Records are never removed, so a reader that counts as many
shows what the history says; otherwise, or without the file, it reads everything. A process that is
killed between the end of the trial and this file costs no more than that.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SlurmrlError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import INTEGER, NUMBER, SECONDS, SIZE, TEXT, Fields, one_of, table
from slurmrl.run.history.log import History
from slurmrl.run.history.recent import recent
from slurmrl.run.paths import RunPaths
from slurmrl.watch import snapshot
from slurmrl.watch.diagnosis import diagnose
from slurmrl.watch.status import ENDS, assemble

logger = log.get(__name__)

KEPT: Fields = {
    "state": one_of(*ENDS.values()),
    "step": INTEGER,
    "total_steps": INTEGER,
    "metrics": table({}),
    "checkpoint": table({"step": INTEGER}, ("step",)),
    "reason": TEXT,
    "submitted": SECONDS,
    "skipped": table({"steps": INTEGER, "model": TEXT}, ("steps", "model")),
    "unjudged": table({"steps": INTEGER, "share": NUMBER}, ("steps", "share")),
}
"""Fields of the status object (see `status`), those that the findings of ended trials need."""
FIELDS: Fields = {"records": SIZE, "metrics_bytes": SIZE, **KEPT}
REQUIRED = ("records", "metrics_bytes", "state", "step", "metrics")


def keep(paths: RunPaths) -> None:
    """Write the file if the trial has ended and it is not up to date. Where that is impossible,
    readers do without it."""
    try:
        if recent(paths.history, exports=False).end is None or read(paths) is not None:
            return
        made_from = _made_from(paths)  # before the rest: a record in between makes the file stale
        trial = snapshot.read(paths)
        if trial.state.end is not None:
            status = assemble(trial, [])
            values = {**made_from, **{name: status[name] for name in KEPT}}
            atomic.replace(paths.overview, json.dumps(values).encode())
    except SlurmrlError as error:
        logger.info("%s is not written: %s", paths.overview, error)


def read(paths: RunPaths) -> dict[str, Any] | None:
    """Return the trial's name, the kept fields and the findings of an ended trial as its status
    object has them; None if the file is missing, stale, damaged or unreadable."""
    with suppress(FileNotFoundError, CorruptFileError, EnvironmentFailure):
        kept = documents.read(paths.overview, FIELDS, REQUIRED)
        if all(kept[name] == value for name, value in _made_from(paths).items()):
            return _status(paths, kept)
    return None


def _made_from(paths: RunPaths) -> dict[str, int]:
    try:
        metrics_bytes = paths.metrics.stat().st_size
    except FileNotFoundError:
        metrics_bytes = 0
    except OSError as error:
        raise EnvironmentFailure(f"{paths.metrics}: {error.strerror}") from error
    return {"records": History(paths.history).count(), "metrics_bytes": metrics_bytes}


def _status(paths: RunPaths, kept: dict[str, Any]) -> dict[str, Any]:
    checkpoint = kept.get("checkpoint")
    status: dict[str, Any] = {name: kept.get(name) for name in KEPT}
    status["trial"] = f"{paths.experiment}/{paths.trial}"
    status["checkpoint"] = checkpoint and {"step": checkpoint["step"], "age_s": None}
    findings = diagnose(status)
    return {
        **status,
        "diagnosis": findings[0].text,
        "findings": [finding._asdict() for finding in findings],
    }
