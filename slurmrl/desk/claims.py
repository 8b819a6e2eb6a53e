"""The exclusive right to submit a trial.

A claim is the request of the next submission number. Its claimant reads the newest number before it
looks at the trial's jobs. A claimant that looked while another process was submitting loses the
next number, or sees a request without jobs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from slurmrl.desk.trial_jobs import Jobs
from slurmrl.errors import UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.processes import Claimant, claimant_words, may_submit
from slurmrl.watch.snapshot import newest_submission


def newest(paths: RunPaths) -> int:
    """Return the number of the newest submission, 0 before the first.

    Raises UsageError while another process is making it.
    """
    submission = newest_submission(paths)
    if submission is None:
        return 0
    if not paths.submission_jobs(submission.number).exists():
        request = documents.read(paths.submission_request(submission.number))
        if may_submit(request):
            raise UsageError(_lost(paths, f" ({claimant_words(request)})"))
    return submission.number


def claim(paths: RunPaths, before: int, request: Mapping[str, Any]) -> int:
    """Claim the submission after ``before``; return its number.

    Raises UsageError if it is taken.
    """
    number = before + 1
    who = {"time": time.time(), **asdict(Claimant.of_this_process())}
    atomic.make_private_directory(paths.submission(number))
    value = json.dumps({**request, **who}).encode()
    if not atomic.exclusive_create(paths.submission_request(number), value):
        raise UsageError(_lost(paths))
    return number


def confirm(paths: RunPaths, jobs: Jobs) -> None:
    """Raise UsageError if there is a newer submission nevertheless, and cancel our jobs.

    An older slurmrl may have made it, or this process seemed dead. Our jobs would also exit by
    themselves.
    """
    newest = newest_submission(paths)
    if newest is not None and newest.number > jobs.number:
        jobs.scheduler.cancel(jobs.ids)
        raise UsageError(_lost(paths, "; the jobs of this command were cancelled"))


def _lost(paths: RunPaths, more: str = "") -> str:
    name = f"{paths.experiment}/{paths.trial}"
    message = f"{name} is being submitted by another process at this moment{more}"
    return f"{message}; see slurmrl status {name}"
