"""Slurm's texts: what squeue and sbatch print (recorded from 22.05 on the test bed)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import SchedulerError
from slurmrl.scheduler import parse
from slurmrl.scheduler.base import JobState

QUEUE = """\
2|1-3%1|PENDING||slurmrl-0123-1-trainer|JobArrayTaskLimit
2|0|RUNNING|n[0-1]|slurmrl-0123-1-trainer|None
7|N/A|COMPLETED|n2|other|None
8|[4-9%4]|PENDING||rollout|Reserved for |a| user
8|3|COMPLETING|n3|rollout|None
"""


def test_queue() -> None:
    jobs = {"rollout": "8", "trainer": "2", "single": "7", "gone": "9"}
    tasks = parse.task_states(parse.queue(QUEUE), jobs)
    shown = [(task.group, task.job_id, task.state.value, task.hosts) for task in tasks]
    assert shown == [
        ("rollout", "8_3", "RUNNING", ("n3",)),
        *[("rollout", f"8_{element}", "PENDING", ()) for element in range(4, 10)],
        ("trainer", "2_0", "RUNNING", ("n0", "n1")),
        *[("trainer", f"2_{element}", "PENDING", ()) for element in range(1, 4)],
        ("single", "7_0", "COMPLETED", ("n2",)),
        ("gone", "9", "UNKNOWN", ()),
    ]
    assert tasks[1].reason == "Reserved for |a| user"
    assert tasks[7].reason == ""


def test_cancelled_pending_links_hide_no_other_link() -> None:
    """Slurm then shows them as one row without elements."""
    text = "2|N/A|CANCELLED||name|JobArrayTaskLimit\n2|0|RUNNING|n0|name|None\n"
    (task,) = parse.task_states(parse.queue(text), {"trainer": "2"})
    assert (task.element, task.state) == (0, JobState.RUNNING)
    first = text.splitlines()[0]
    (task,) = parse.task_states(parse.queue(first), {"trainer": "2"})
    assert (task.element, task.state) == (0, JobState.CANCELLED)


def test_a_line_that_is_none_is_refused() -> None:
    with pytest.raises(SchedulerError, match="slurm_load_jobs"):
        parse.queue("slurm_load_jobs error: Unable to contact slurm controller\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", (3,)),
        ("[4-9%4]", (4, 5, 6, 7, 8, 9)),
        ("4-6%1", (4, 5, 6)),
        ("0,2-6:2", (0, 2, 4, 6)),
        ("N/A", ()),
        ("", ()),
    ],
)
def test_elements(text: str, expected: tuple[int, ...]) -> None:
    assert parse.elements(text) == expected


def test_elements_that_are_cut_short_are_refused() -> None:
    with pytest.raises(SchedulerError, match="not a range"):
        parse.elements("1,3,5,7,...")


@given(st.sets(st.integers(0, 60), min_size=1))
def test_element_list_is_read_back(values: set[int]) -> None:
    assert parse.elements(parse.element_list(values)) == tuple(sorted(values))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("n0", ("n0",)),
        ("n[0-2]", ("n0", "n1", "n2")),
        ("n[008-010,12],m", ("n008", "n009", "n010", "n12", "m")),
        ("rack[1-2]gpu[3,5]-ib", ("rack1gpu3-ib", "rack1gpu5-ib", "rack2gpu3-ib", "rack2gpu5-ib")),
        ("a-1,b[2]", ("a-1", "b2")),
    ],
)
def test_hosts(text: str, expected: tuple[str, ...]) -> None:
    assert parse.hosts(text) == expected


@pytest.mark.parametrize("text", ["41\n", "41;cluster\n", "a message of the site\n41\n"])
def test_job_id(text: str) -> None:
    assert parse.job_id(text) == "41"


@pytest.mark.parametrize("text", ["", "Submitted batch job 41", "x41"])
def test_what_is_no_job_id(text: str) -> None:
    with pytest.raises(SchedulerError, match="job id"):
        parse.job_id(text)
