"""Lines of squeue, scontrol, sacct and sinfo as Slurm 22.05, 24.11 and 26.05 printed them.

The newer two are of one scenario, whose jobs are told apart by their names: with accounting, memory
limits, a prolog and an epilog that can be slow, and n3 set down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import extensions, parse, states
from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.client import is_dead

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_squeue_rows_of_22_05_are_parsed() -> None:
    jobs = {"trainer": ("1", "2"), "single": ("3",), "gone": ("9",)}
    found = states.task_states(states.queue(recorded("squeue-22.05.txt")), jobs)
    shown = [(task.group, task.job_id, task.state.value, task.words) for task in found]
    behind = "it waits for the previous link to end; nothing to do but wait"
    later = "it waits for the previous job to end; nothing to do but wait"
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


NEWER = ("24.11", "26.05")
CHAIN = "rec x=1 JobState=RUNNING"
ALIVE = (None, None)
QUEUED: dict[tuple[str, int | None], tuple[str, JobState, tuple[int | None, int | None], str]] = {
    ("rec", 0): ("FAILED", JobState.FAILED, (3, None), "ended with exit code 3"),
    ("rec", 1): ("FAILED", JobState.FAILED, (0, 9), "was ended by signal 9 (SIGKILL)"),
    ("rec", 2): ("RUNNING", JobState.RUNNING, ALIVE, ""),
    ("rec", 3): ("PENDING", JobState.PENDING, ALIVE, "waits for the previous link"),
    **{
        (CHAIN, element): ("PENDING", JobState.PENDING, ALIVE, "waits for the previous job")
        for element in (4, 5, 6, 7)
    },
    ("wrap", None): ("PENDING", JobState.PENDING, ALIVE, "its earliest start time"),
    ("late", None): ("TIMEOUT", JobState.TIMEOUT, (0, 15), "reached its time limit"),
    ("low", None): ("PREEMPTED", JobState.PREEMPTED, (0, 15), "preempted by another job"),
    ("high", None): ("COMPLETED", JobState.COMPLETED, (0, None), "ended with exit code 0"),
    ("hungry", None): ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY, (0, 125), "used more memory"),
    ("lost", None): ("NODE_FAIL", JobState.NODE_FAIL, (0, 1), "a host failed"),
    ("waits", None): ("PENDING", JobState.PENDING, ALIVE, "(UnavailableNodes:n3)"),
    ("paused", None): ("SUSPENDED", JobState.RUNNING, ALIVE, "suspended, keeps its hosts"),
    ("stopped", None): ("STOPPED", JobState.RUNNING, ALIVE, "stopped by a signal"),
    ("held", None): ("PENDING", JobState.PENDING, ALIVE, "you hold it"),
    ("special", None): ("SPECIAL_EXIT", JobState.PENDING, ALIVE, "you hold it"),
    ("again", None): ("RUNNING", JobState.RUNNING, ALIVE, ""),
    ("again2", None): ("COMPLETING", JobState.RUNNING, ALIVE, "is ending"),
    ("gone", None): ("CANCELLED", JobState.CANCELLED, (0, 15), "cancelled by"),
    ("slowend", None): (
        "COMPLETING",
        JobState.RUNNING,
        (1, None),
        "ended with exit code 1, some hosts are still busy",
    ),
    ("slowstart", None): ("PENDING", JobState.PENDING, ALIVE, "hosts it needs are busy"),
    ("wide", None): ("PENDING", JobState.PENDING, ALIVE, "down, drained or reserved"),
    ("deadline", None): ("PENDING", JobState.PENDING, ALIVE, "jobs of higher priority"),
}
"""By name and element: Slurm's state, ours, exit code and signal, and what the words say."""


def by_name(found: Iterable[states.QueueRow]) -> dict[tuple[str, int | None], states.QueueRow]:
    return {(row.name, element): row for row in found for element in row.elements or (None,)}


@pytest.mark.parametrize("version", NEWER)
@pytest.mark.parametrize(
    ("command", "read"), [("squeue", states.queue), ("scontrol", states.control)]
)
def test_job_rows_of_newer_versions_are_parsed(
    version: str, command: str, read: Callable[[str], list[states.QueueRow]]
) -> None:
    found = by_name(read(recorded(f"{command}-{version}.txt")))
    assert found.keys() == QUEUED.keys()
    for key, (raw, state, ended, words) in QUEUED.items():
        row = found[key]
        assert (row.raw, states.interpret(row.raw).state) == (raw, state), key
        assert (row.exit_code, row.signal) == ended, key
        assert words in states.words(row), key
        assert bool(row.hosts) == (raw not in ("PENDING", "SPECIAL_EXIT")), key
    restarts = {name: row.restarts for (name, _), row in found.items() if row.restarts}
    assert restarts == {"held": 1, "special": 1, "again": 1, "again2": 1}
    left_s = found["rec", 2].time_left_s
    assert left_s is not None
    assert 300 < left_s < 600


@pytest.mark.parametrize("version", NEWER)
def test_squeue_and_scontrol_give_equal_rows(version: str) -> None:
    one = by_name(states.queue(recorded(f"squeue-{version}.txt")))
    other = by_name(states.control(recorded(f"scontrol-{version}.txt")))
    for key, row in one.items():
        same = other[key]
        assert (row.job, row.raw, row.hosts, row.restarts) == (
            same.job,
            same.raw,
            same.hosts,
            same.restarts,
        )
        assert row.reason.replace(" ", "_") == same.reason.replace(" ", "_")
        if row.raw not in ("PENDING", "COMPLETING"):  # of which squeue gives a guess, or nothing
            assert row.start == same.start, key


def test_scontrol_output_of_22_05_is_parsed() -> None:
    jobs = {"trainer": ("1", "2"), "single": ("3",)}
    found = states.task_states(states.control(recorded("scontrol-22.05.txt")), jobs)
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


def test_sacct_rows_of_22_05_are_parsed() -> None:
    found = states.accounting(recorded("sacct-22.05.txt"))
    assert {row.job: row.raw for row in found if row.job != "1"} == {
        "2": "TIMEOUT",
        "3": "PREEMPTED",
        "4": "NODE_FAIL",
        "8": "COMPLETED",
    }
    shown = states.task_states(found, {"trainer": ("1",)})
    assert [(task.element, task.state, task.exit_code, task.hosts) for task in shown] == [
        (0, JobState.COMPLETED, 0, ("n0",)),
        (1, JobState.FAILED, 3, ("n0",)),
        (2, JobState.CANCELLED, 0, ("n0",)),
        (3, JobState.CANCELLED, 0, ()),
    ]


@pytest.mark.parametrize("version", NEWER)
def test_sacct_rows_of_newer_versions_are_parsed(version: str) -> None:
    """The rows show the same jobs a few seconds later, after the arrays were cancelled."""
    found = by_name(states.accounting(recorded(f"sacct-{version}.txt")))
    assert found.keys() == QUEUED.keys()
    cancelled = {key for key in found if key in (("rec", 2), ("rec", 3)) or key[0] == CHAIN}
    later = {"slowend": "FAILED", "again2": "REQUEUED", "stopped": "RUNNING", "special": "PENDING"}
    for key, row in found.items():
        raw = "CANCELLED by 0" if key in cancelled else later.get(key[0], QUEUED[key][0])
        assert row.raw.startswith(raw), key
    assert (found["late", None].hosts, found["rec", 3].hosts) == (("n1",), ())
    assert (found["rec", 0].exit_code, found["rec", 1].signal) == (3, 9)


@pytest.mark.parametrize("version", NEWER)
def test_sinfo_rows_of_newer_versions_are_parsed(version: str) -> None:
    found = parse.cluster_hosts(recorded(f"sinfo-{version}.txt"))
    assert [(host.name, host.gpus) for host in found] == [(f"n{index}", 2) for index in range(4)]
    assert [host.name for host in found if is_dead(host.state)] == ["n3"]


@pytest.mark.parametrize("version", NEWER)
def test_limits_of_newer_versions_are_parsed(version: str) -> None:
    text = recorded(f"assoc-{version}.txt")
    assert extensions.submit_room(text, "root", "poor") == 3
    assert extensions.submit_room(text, "root", None) is None, "the default account has none"


def test_sacct_rows_of_pending_requeued_and_killed_elements_are_parsed() -> None:
    text = (
        "41_[4-6%1]|PENDING|0:0|None assigned|x|Unknown|Priority\n"
        "41_1|OUT_OF_MEMORY|0:125|n[0-1]|x|2026-11-21T14:25:12|OutOfMemory\n"
        "41_2|REQUEUED|0:0|n0|x|2026-11-21T14:25:12|None\n"
        "42+0|FAILED|0:9|n0|x|2026-11-21T14:25:12|None\n"
    )
    pending, oom, requeued, het = states.accounting(text)
    assert (pending.elements, pending.exit_code, pending.start) == ((4, 5, 6), None, "")
    assert (oom.raw, oom.hosts, oom.signal) == ("OUT_OF_MEMORY", ("n0", "n1"), 125)
    assert requeued.exit_code is None
    assert (het.job, het.elements, het.signal) == ("42", (), 9)


def test_cancelled_pending_elements_do_not_hide_others() -> None:
    """Slurm then shows them as one row without elements."""
    text = "2|N/A|CANCELLED||name|0|10:00|N/A|0|JobArrayTaskLimit|\n"
    running = "2|0|RUNNING|n0|name|0|9:00|2026-11-21T12:26:47|0|None|\n"
    (task,) = states.task_states(states.queue(text + running), {"trainer": ("2",)})
    assert (task.element, task.state) == (0, JobState.RUNNING)
    (task,) = states.task_states(states.queue(text), {"trainer": ("2",)})
    assert (task.element, task.state) == (0, JobState.CANCELLED)
    later = "3|1|PENDING||name|0|10:00|N/A|0|Dependency|\n"
    (task,) = states.task_states(states.queue(text + later), {"trainer": ("2", "3")})
    assert (task.job_id, task.state) == ("3_1", JobState.PENDING)


def test_reason_may_contain_separators() -> None:
    text = "8|4-5%4|PENDING||x|0|10:00|N/A|0|Reserved for |a| user|\n"
    (row,) = states.queue(text)
    assert (row.elements, row.reason) == ((4, 5), "Reserved for |a| user")


@pytest.mark.parametrize("text", ["slurm_load_jobs error: Unable to contact slurm controller\n"])
def test_invalid_row_is_rejected(text: str) -> None:
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        states.queue(text)
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        states.accounting(text)
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        states.control(text)


BANNERS = (
    "| Welcome to the cluster |\n+---+\n{}",
    "{}\nNote: maintenance | on Monday | 8 to 12\n",
    "\n7 jobs of yours are queued\n{}\nQuota: 12|100\n",
)
"""What wrappers of sites print around Slurm's output."""
ROW = "41|0|RUNNING|n0|a|0:0|1:00|N/A|0|None|"
CONTROLLED = recorded("scontrol-22.05.txt")
ACCOUNTED = "41_0|COMPLETED|0:0|n0|a|2026-01-01T00:00:00|None"


@pytest.mark.parametrize("banner", BANNERS)
def test_rows_are_found_among_lines_that_a_wrapper_prints(banner: str) -> None:
    assert states.queue(banner.format(ROW)) == states.queue(ROW)
    assert states.control(banner.format(CONTROLLED)) == states.control(CONTROLLED)
    assert states.accounting(banner.format(ACCOUNTED)) == states.accounting(ACCOUNTED)
    assert parse.partition_names(banner.format("gpu|up\ncpu|down")) == ["cpu", "gpu"]
    assert parse.time_left_s(banner.format("1-02:03:04")) == 93784
    assert parse.time_left_s(banner.format("UNLIMITED")) is None
    assert parse.accounts(banner.format("me|project|project\nme|project|other")) == parse.Accounts(
        ("project", "other"), "project"
    )
    limits = {"normal": "", "quick": "1-00:30:00"}
    assert parse.qos_limits(banner.format("normal|\nquick|1-00:30:00")) == limits
    assert parse.version(banner.format("slurm-wlm 22.05.8")) == "22.05.8"
    assert parse.names(banner.format("Hosts=n[0-3,7],gpu-1"), "Hosts") == ["gpu-1", "n[0-3,7]"]
    assert parse.names(banner.format("Features=a100,ib\nFeatures=(null)"), "Features") == [
        "a100",
        "ib",
    ]


@pytest.mark.parametrize("text", ["the controller is away", BANNERS[0].format("")])
def test_scheduler_output_without_rows_is_rejected(text: str) -> None:
    """An answer without rows would mean that all jobs are gone."""
    for read in (states.queue, states.control, states.accounting):
        with pytest.raises(SchedulerError, match="unexpected line from"):
            read(text)
        assert read("") == []


@pytest.mark.parametrize("text", ["41|0|RUNNING", f"{ROW}\n41|1|PENDING|"])
def test_row_with_other_fields_is_rejected(text: str) -> None:
    with pytest.raises(SchedulerError, match="unexpected line from squeue"):
        states.queue(text)
