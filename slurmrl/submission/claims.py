"""The exclusive right to submit a trial.

A claim is the request of the next submission number. Its claimant reads the newest number before it
looks at the trial's jobs. A claimant that looked while another process was submitting loses the
next number, or sees a request without jobs.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.monitor.snapshot import newest_submission
from slurmrl.paths import RunPaths
from slurmrl.scheduler.processes import ProcessId, boot_id
from slurmrl.submission.live import Jobs

SETTLE_S = 150.0
"""Seconds after which a submission without job ids, made on another host, counts as abandoned:
longer than an sbatch may take."""


def newest(paths: RunPaths) -> int:
    """Return the number of the newest submission, 0 before the first. Raises UsageError while
    another process is making it."""
    submission = newest_submission(paths)
    if submission is None:
        return 0
    if not paths.submission_jobs(submission.number).exists():
        request = documents.read(paths.submission_request(submission.number))
        if _in_progress(request):
            where = f"on {request.get('host')}, process {request.get('pid')}"
            raise UsageError(_lost(paths, f" ({where})"))
    return submission.number


def claim(paths: RunPaths, before: int, request: Mapping[str, Any]) -> int:
    """Claim the submission after ``before``; return its number. Raises UsageError if it is
    taken."""
    number = before + 1
    me = ProcessId.of(os.getpid())
    assert me is not None, "this process runs"
    who = {
        "nonce": uuid.uuid4().hex,
        "time": time.time(),
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": me.pid,
        "start_ticks": me.start_ticks,
    }
    atomic.make_private_directory(paths.submission(number))
    value = json.dumps({**request, **who}).encode()
    if not atomic.exclusive_create(paths.submission_request(number), value):
        raise UsageError(_lost(paths))
    return number


def confirm(paths: RunPaths, jobs: Jobs) -> None:
    """Raise UsageError if there is a newer submission nevertheless (by an older slurmrl, or because
    this process seemed dead). Our jobs are cancelled then; they would exit by themselves."""
    newest = newest_submission(paths)
    if newest is not None and newest.number > jobs.number:
        jobs.scheduler.cancel(jobs.ids)
        raise UsageError(_lost(paths, "; the jobs of this command were cancelled"))


def _in_progress(request: Mapping[str, Any]) -> bool:
    """Return whether the process that made a request may still submit its jobs."""
    pid, ticks = request.get("pid"), request.get("start_ticks")
    here = request.get("boot") == boot_id()
    if here and isinstance(pid, int) and isinstance(ticks, int):
        return pid != os.getpid() and ProcessId(pid, ticks).alive()
    if request.get("host") == socket.gethostname():
        return False  # before this machine was started again, or by an older slurmrl
    made = request.get("time")
    return isinstance(made, int | float) and abs(time.time() - made) < SETTLE_S


def _lost(paths: RunPaths, more: str = "") -> str:
    name = f"{paths.experiment}/{paths.trial}"
    message = f"{name} is being submitted by another process at this moment{more}"
    return f"{message}; see slurmrl status {name}"
