"""Slurm's job states and their meanings."""

from __future__ import annotations

import pytest

from slurmrl.scheduler import states
from slurmrl.scheduler.base import JobState

MANUAL_22_05 = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "CONFIGURING",
    "COMPLETING",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "PREEMPTED",
    "RUNNING",
    "RESV_DEL_HOLD",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "REQUEUED",
    "RESIZING",
    "REVOKED",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
)
"""JOB STATE CODES in squeue(1) of Slurm 22.05."""
LATER = ["EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "UPDATE_DB"]


@pytest.mark.parametrize("name", [*MANUAL_22_05, *LATER])
def test_every_slurm_state_is_known(name: str) -> None:
    assert states.interpret(name).state is not JobState.UNKNOWN
    assert (name in states.BASE_STATES) != (name in states.FLAGS)


def test_job_that_can_continue_has_not_ended() -> None:
    ended = {
        name
        for table in (states.BASE_STATES, states.FLAGS)
        for name, known in table.items()
        if not known.state.active
    }
    assert ended == {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("RUNNING", JobState.RUNNING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("PENDING,REQUEUED", JobState.PENDING),
        ("FAILED,COMPLETING", JobState.RUNNING),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_slurm_state_is_interpreted(raw: str, expected: JobState) -> None:
    assert states.interpret(raw).state is expected


@pytest.mark.parametrize(
    ("raw", "reason", "expected"),
    [
        ("COMPLETING", "JobLaunchFailure", JobState.FAILED),  # Slurm 22.05
        ("COMPLETING", "RaisedSignal:9(Killed)", JobState.FAILED),  # Slurm 24.11 and newer
        ("COMPLETING", "None", None),  # a preempted, requeued or cancelled job
        ("RUNNING", "NonZeroExitCode", None),
        ("FAILED", "NonZeroExitCode", None),
    ],
)
def test_completing_job_is_reported_by_its_final_state(
    raw: str, reason: str, expected: JobState | None
) -> None:
    assert states.ending(raw, reason) is expected
