"""Work of the batch process at the end of a trial: a notification and a report.

The notification is a JSON object that a batch process posts to the user's webhook when a trial has
finished or failed. The process first claims the notification with a file, so it is posted at most
once. If the process dies before it posts the notification, no other process does. This module
neither changes the outcome of a job nor delays the job for long.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slurmrl import child, log
from slurmrl.config import source
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Cluster
from slurmrl.display.terminal import first_line
from slurmrl.errors import SlurmrlError
from slurmrl.fsio import atomic, inputs
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import recent
from slurmrl.run.paths import RunPaths
from slurmrl.watch import snapshot
from slurmrl.watch.status import assemble

logger = log.get(__name__)

LONGEST_S = 30.0
"""Maximum time for which a job waits until the notification is posted."""
TRY_S = 8.0
"""Timeout of each network operation of an attempt."""
PAUSES_S = (2.0, 4.0)
"""Pauses between the attempts."""
TEMPORARY = (408, 425, 429)
"""HTTP status codes below 500 after which another attempt may succeed."""
REPORT_S = 30.0
"""Maximum seconds to write the report. A report of 50,000 steps takes a few seconds."""


def announce(paths: RunPaths) -> None:
    """Post the notification of a trial's end unless another process has done so. Never raise."""
    thread = threading.Thread(target=_post_notice, args=(paths,), daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    if thread.is_alive():
        text = "no notification was sent: the webhook did not answer within %.0f s"
        logger.warning(text, LONGEST_S)


def _post_notice(paths: RunPaths) -> None:
    try:
        end = recent(paths.history, exports=False).end
        config = load_resolved(paths.config)
        name = config.notify.webhook
        if end is None or end.kind is Kind.CANCELLED or name is None:
            return
        url = _environment(config.cluster).get(name, "")
        if urlsplit(url).scheme not in ("http", "https"):
            logger.warning("no notification was sent: variable %s holds no http or https URL", name)
        elif _claim(paths, end):
            post(url, message(assemble(snapshot.read(paths), [])))
    except (SlurmrlError, OSError, ValueError) as error:
        # The message of the error may contain the URL, which is secret.
        logger.warning("no notification was sent: %s", type(error).__name__)


def _environment(cluster: Cluster) -> dict[str, str]:
    """Return the environment that the agents of the run get."""
    found = {**os.environ, **cluster.env}
    with suppress(SlurmrlError):  # This error ended the trial, so its reason already names it.
        if file := cluster.variables_file:
            found |= inputs.read_variables(Path(file))
    return found


def _claim(paths: RunPaths, end: Record) -> bool:
    """Claim the notification. Return whether this process must post it, being the first."""
    claim = {"time": time.time(), "nonce": uuid.uuid4().hex}
    return atomic.exclusive_create(paths.notice(end.slot), json.dumps(claim).encode() + b"\n")


def message(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of the notification. Chat programs show its ``text``."""
    total = "" if status["total_steps"] is None else f"/{status['total_steps']}"
    why = f": {first_line(status['reason'])}" if status["state"] == "FAILED" else ""
    kept = ("trial", "state", "reason", "step", "total_steps", "run")
    return {
        "text": f"{status['trial']} {status['state']} at step {status['step']}{total}{why}",
        **{name: status[name] for name in kept},
    }


def post(url: str, notice: Mapping[str, Any]) -> None:
    """Post an object as JSON; retry a few times. Log a failure without the URL, which is secret."""
    body = json.dumps(notice).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    for pause_s in (*PAUSES_S, None):
        try:
            with urllib.request.urlopen(request, timeout=TRY_S):
                return
        except urllib.error.HTTPError as error:
            why = f"the webhook answered with HTTP status {error.code}"
            if error.code < 500 and error.code not in TEMPORARY:
                break
        except urllib.error.URLError as error:
            why = f"the webhook cannot be reached: {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            why = f"the webhook cannot be reached: {type(error).__name__}"
        if pause_s is not None:
            time.sleep(pause_s)
    logger.warning("no notification was sent: %s", why)


def write_report(paths: RunPaths, within_s: float = REPORT_S) -> None:
    """Write ``report.html`` if the trial has finished or failed, unless `logging.report` is off.

    Give up after ``within_s`` seconds. Errors do not change the outcome of the job.
    """
    try:
        end = recent(paths.history, exports=False).end
        if end is None or end.kind is Kind.CANCELLED or not _wanted(paths):
            return
        ended = _run(_command(paths), within_s)
    except (SlurmrlError, OSError) as error:
        ended = str(error)
    if ended:
        logger.warning("cannot write %s: %s", paths.report, ended)


def _wanted(paths: RunPaths) -> bool:
    """Return whether the report is enabled. Read only this setting: ignore errors in the file."""
    section = source.read(paths.config).values.get("logging")
    return not (isinstance(section, dict) and section.get("report") is False)


def _command(paths: RunPaths) -> list[str]:
    """Return the command that writes a report in a process that can be killed at any time."""
    root = paths.run.parents[2]
    place = ["--root", str(root), "--output", str(paths.report)]
    return [sys.executable, "-P", "-m", "slurmrl", "report", paths.full_name, *place]


def _run(command: Sequence[str], within_s: float) -> str:
    """Run a command and show its errors in this process's output. Return why it failed, or ""."""
    code = child.run(command, within_s, shown=True).code
    if code is None:
        return f"it took longer than {within_s:.0f} s"
    return f"slurmrl report exited with {code}" if code else ""
