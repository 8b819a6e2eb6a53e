"""Every job state and state flag of Slurm 22.05 and newer, with its meaning.

Names and meanings are those of squeue's manual page, section JOB STATE CODES, and of ``job_states``
in slurm.h. A flag is shown in place of the base state that it modifies.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from slurmrl.scheduler.base import JobState


class SlurmState(NamedTuple):
    state: JobState
    meaning: str


BASE_STATES: dict[str, SlurmState] = {
    "PENDING": SlurmState(JobState.PENDING, "waits for resources"),
    "RUNNING": SlurmState(JobState.RUNNING, "runs"),
    "SUSPENDED": SlurmState(JobState.RUNNING, "suspended, keeps its hosts"),
    "COMPLETED": SlurmState(JobState.COMPLETED, "ended with exit code 0"),
    "CANCELLED": SlurmState(JobState.CANCELLED, "cancelled by a user or an administrator"),
    "FAILED": SlurmState(JobState.FAILED, "ended with an exit code or a signal"),
    "TIMEOUT": SlurmState(JobState.TIMEOUT, "reached its time limit"),
    "NODE_FAIL": SlurmState(JobState.NODE_FAIL, "a host failed"),
    "PREEMPTED": SlurmState(JobState.PREEMPTED, "preempted by another job"),
    "BOOT_FAIL": SlurmState(JobState.NODE_FAIL, "a host did not boot"),
    "DEADLINE": SlurmState(JobState.TIMEOUT, "reached its deadline"),
    "OUT_OF_MEMORY": SlurmState(JobState.OUT_OF_MEMORY, "used more memory than it requested"),
}

FLAGS: dict[str, SlurmState] = {
    "COMPLETING": SlurmState(JobState.RUNNING, "is ending, some hosts are still busy"),
    "CONFIGURING": SlurmState(JobState.PENDING, "its hosts are being prepared"),
    "EXPEDITING": SlurmState(JobState.PENDING, "was requeued and starts again with priority"),
    "LAUNCH_FAILED": SlurmState(JobState.FAILED, "could not be started on its hosts"),
    "POWER_UP_NODE": SlurmState(JobState.PENDING, "has hosts that are powering up"),
    "RECONFIG_FAIL": SlurmState(JobState.FAILED, "its hosts could not be configured"),
    "REQUEUED": SlurmState(JobState.PENDING, "was requeued"),
    "REQUEUE_FED": SlurmState(JobState.PENDING, "is being requeued by the federation"),
    "REQUEUE_HOLD": SlurmState(JobState.PENDING, "was requeued and is held"),
    "RESIZING": SlurmState(JobState.RUNNING, "is changing its size"),
    "RESV_DEL_HOLD": SlurmState(JobState.PENDING, "held: its reservation was deleted"),
    "REVOKED": SlurmState(JobState.CANCELLED, "another cluster of the federation runs it"),
    "SIGNALING": SlurmState(JobState.RUNNING, "is being signalled"),
    "SPECIAL_EXIT": SlurmState(JobState.PENDING, "was requeued in a special state and is held"),
    "STAGE_OUT": SlurmState(JobState.RUNNING, "is copying files out"),
    "STOPPED": SlurmState(JobState.RUNNING, "stopped by a signal, keeps its hosts"),
    "UPDATE_DB": SlurmState(JobState.RUNNING, "waits for an update of the database"),
}

UNKNOWN = SlurmState(JobState.UNKNOWN, "a state that this version of slurmrl does not know")

ENDINGS: dict[str, JobState] = {
    "JobLaunchFailure": JobState.FAILED,
    "NodeDown": JobState.NODE_FAIL,
    "NonZeroExitCode": JobState.FAILED,
    "OutOfMemory": JobState.OUT_OF_MEMORY,
    "RaisedSignal": JobState.FAILED,
    "TimeLimit": JobState.TIMEOUT,
}
"""What the reason of a job that is completing says about its end, which the flag hides. A batch
process killed by a signal is a ``JobLaunchFailure`` in 22.05, a ``RaisedSignal`` in newer ones."""


def interpret(raw: str) -> SlurmState:
    """Interpret Slurm's text for a state: ``RUNNING``, ``PENDING,REQUEUED``, sacct's
    ``CANCELLED by 1000``. A flag is more specific than its base state, so it wins."""
    words = [word for word in re.split(r"[,+\s]+", raw.upper()) if word]
    for table in (FLAGS, BASE_STATES):
        for word in words:
            if word in table:
                return table[word]
    return UNKNOWN


def ending(raw: str, reason: str) -> JobState | None:
    """Return the state that a job will have once its last host is free, if the reason tells; None
    for a job that is not completing."""
    if "COMPLETING" not in raw.upper():
        return None
    return ENDINGS.get(reason.partition(":")[0])
