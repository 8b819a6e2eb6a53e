"""Lines of squeue, scontrol and sacct, recorded from Slurm 22.05 or as newer ones document them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import rows, tasks
from slurmrl.scheduler.base import JobState

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_squeue_of_22_05() -> None:
    jobs = {"trainer": ("1", "2"), "single": ("3",), "gone": ("9",)}
    found = tasks.task_states(rows.queue(recorded("squeue-22.05.txt")), jobs)
    shown = [(task.group, task.job_id, task.state.value, task.words) for task in found]
    behind = "it waits for the link before it to end; nothing to do but wait"
    later = "it waits for the job before it to end; nothing to do but wait"
    assert shown[:4] == [
        ("trainer", "1_0", "FAILED", "ended with exit code 3"),
        ("trainer", "1_1", "FAILED", "was ended by signal 9 (SIGKILL)"),
        ("trainer", "1_2", "RUNNING", ""),
        ("trainer", "1_3", "PENDING", behind),
    ]
    assert shown[4:8] == [("trainer", f"2_{n}", "PENDING", later) for n in (4, 5, 6, 7)]
    assert [entry[:3] for entry in shown[8:]] == [
        ("single", "3_0", "PENDING"),
        ("gone", "9", "UNKNOWN"),
    ]
    runs = found[2]
    assert (runs.time_left_s, runs.start, runs.hosts) == (597.0, "2026-11-21T12:26:47", ("n0",))
    assert found[8].start == "2026-11-21T13:26:44"


def test_squeue_of_newer_versions() -> None:
    """Exit codes as ``code:signal``, several states in one word, reasons as free text."""
    found = rows.queue(recorded("squeue-newer.txt"))
    shown = tasks.task_states(found, {"trainer": ("41",)})
    assert [(task.element, task.state, task.exit_code, task.signal) for task in shown] == [
        (0, JobState.PREEMPTED, 0, 15),
        (1, JobState.OUT_OF_MEMORY, 0, 125),
        (2, JobState.RUNNING, None, None),
        (3, JobState.PENDING, None, None),
        (4, JobState.PENDING, None, None),
    ]
    assert shown[2].words == "is ending, some hosts are still busy"
    assert "down, drained or reserved" in shown[3].words
    assert shown[4].restarts == 2


def test_scontrol_of_22_05() -> None:
    jobs = {"trainer": ("1", "2"), "single": ("3",)}
    found = tasks.task_states(rows.control(recorded("scontrol-22.05.txt")), jobs)
    shown = [(task.job_id, task.state.value, task.exit_code, task.signal) for task in found]
    assert shown == [
        ("1_0", "FAILED", 3, None),
        ("1_1", "FAILED", 0, 9),
        ("1_2", "RUNNING", None, None),
        ("1_3", "PENDING", None, None),
        *((f"2_{element}", "PENDING", None, None) for element in (4, 5, 6, 7)),
        ("3_0", "PENDING", None, None),
    ]
    runs = found[2]
    assert (runs.time_left_s, runs.start, runs.hosts) == (590.0, "2026-11-21T16:36:34", ("n0",))
    assert [task.reason for task in found[3:5]] == ["JobArrayTaskLimit", "Dependency"]


def test_scontrol_of_newer_versions() -> None:
    """A node that failed, and a comment that looks like fields."""
    lost, pending = rows.control(recorded("scontrol-newer.txt"))
    assert (lost.raw, lost.reason, lost.hosts) == ("NODE_FAIL", "NodeDown", ("n0", "n1"))
    assert (lost.job, lost.elements, lost.restarts) == ("41", (2,), 1)
    assert lost.time_left_s == 86395.0
    assert (pending.elements, pending.time_left_s) == ((3, 4, 5, 6, 7), None)
    (task, *_) = tasks.task_states([pending], {"trainer": ("41",)})
    assert "down, drained or reserved" in task.words


def test_sacct_of_22_05() -> None:
    found = rows.accounting(recorded("sacct-22.05.txt"))
    assert {row.job: row.raw for row in found if row.job != "1"} == {
        "2": "TIMEOUT",
        "3": "PREEMPTED",
        "4": "NODE_FAIL",
        "8": "COMPLETED",
    }
    shown = tasks.task_states(found, {"trainer": ("1",)})
    assert [(task.element, task.state, task.exit_code, task.hosts) for task in shown] == [
        (0, JobState.COMPLETED, 0, ("n0",)),
        (1, JobState.FAILED, 3, ("n0",)),
        (2, JobState.CANCELLED, 0, ("n0",)),
        (3, JobState.CANCELLED, 0, ()),
    ]


def test_sacct_of_pending_requeued_and_killed_elements() -> None:
    text = (
        "41_[4-6%1]|PENDING|0:0|None assigned|x|Unknown|Priority\n"
        "41_1|OUT_OF_MEMORY|0:125|n[0-1]|x|2026-11-21T14:25:12|OutOfMemory\n"
        "41_2|REQUEUED|0:0|n0|x|2026-11-21T14:25:12|None\n"
        "42+0|FAILED|0:9|n0|x|2026-11-21T14:25:12|None\n"
    )
    pending, oom, requeued, het = rows.accounting(text)
    assert (pending.elements, pending.exit_code, pending.start) == ((4, 5, 6), None, "")
    assert (oom.raw, oom.hosts, oom.signal) == ("OUT_OF_MEMORY", ("n0", "n1"), 125)
    assert requeued.exit_code is None
    assert (het.job, het.elements, het.signal) == ("42", (), 9)


def test_cancelled_pending_links_hide_no_other_link() -> None:
    """Slurm then shows them as one row without elements."""
    text = "2|N/A|CANCELLED||name|0|10:00|N/A|0|JobArrayTaskLimit|\n"
    running = "2|0|RUNNING|n0|name|0|9:00|2026-11-21T12:26:47|0|None|\n"
    (task,) = tasks.task_states(rows.queue(text + running), {"trainer": ("2",)})
    assert (task.element, task.state) == (0, JobState.RUNNING)
    (task,) = tasks.task_states(rows.queue(text), {"trainer": ("2",)})
    assert (task.element, task.state) == (0, JobState.CANCELLED)
    later = "3|1|PENDING||name|0|10:00|N/A|0|Dependency|\n"
    (task,) = tasks.task_states(rows.queue(text + later), {"trainer": ("2", "3")})
    assert (task.job_id, task.state) == ("3_1", JobState.PENDING)


def test_a_reason_may_hold_anything() -> None:
    text = "8|4-5%4|PENDING||x|0|10:00|N/A|0|Reserved for |a| user|\n"
    (row,) = rows.queue(text)
    assert (row.elements, row.reason) == ((4, 5), "Reserved for |a| user")


@pytest.mark.parametrize("text", ["slurm_load_jobs error: Unable to contact slurm controller\n"])
def test_a_line_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        rows.queue(text)
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        rows.accounting(text)
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        rows.control(text)
