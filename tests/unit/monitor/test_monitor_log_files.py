from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.errors import UnknownNameError
from slurmrl.watch.log_files import newest, serving
from tests.fake_runs import FakeRun


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    for name in ("0.0.log", "0.9.log", "0.10.log", "1.3.log", "slurm-41_0.out"):
        run.log(name, name)
    run.log("0.0.log", "r", group="rollout")
    return run


def names(run: FakeRun, group: str | None = None, task: int | None = None) -> list[tuple[str, str]]:
    return [(file.label, file.path.name) for file in newest(run.paths, group, task)]


def test_newest_attempt_of_each_task_is_listed(run: FakeRun) -> None:
    assert names(run) == [
        ("rollout/0", "0.0.log"),
        ("trainer/0", "0.10.log"),
        ("trainer/1", "1.3.log"),
        ("trainer/batch", "slurm-41_0.out"),
    ]


def test_logs_of_one_group_or_one_task_are_listed(run: FakeRun) -> None:
    assert names(run, "rollout") == [("rollout/0", "0.0.log")]
    assert names(run, None, 1) == [("trainer/1", "1.3.log")]
    assert names(run, "trainer", 0) == [("trainer/0", "0.10.log")]


def test_newest_batch_output_is_listed_if_no_agent_started(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.log("slurm-41_1.out", "newer")
    run.log("slurm-41_0.out", "older")
    run.log("chain.1.out", "")
    os.utime(run.paths.logs / "trainer" / "slurm-41_0.out", (1, 1))
    assert names(run) == [("trainer/batch", "slurm-41_1.out")]


@pytest.mark.parametrize(
    ("group", "task", "message"),
    [("trainr", None, "did you mean 'trainer'"), (None, 7, "no logs of task '7'; .* 0, 1")],
)
def test_unknown_groups_and_tasks_are_rejected(
    run: FakeRun, group: str | None, task: int | None, message: str
) -> None:
    with pytest.raises(UnknownNameError, match=message):
        newest(run.paths, group, task)


def test_no_logs_are_listed_before_the_first_write(tmp_path: Path) -> None:
    assert names(FakeRun(tmp_path), "trainer") == []


def test_logs_of_one_incarnation_are_listed(run: FakeRun) -> None:
    """The logs of all agents and of the master are listed."""
    for name in ("0.0.log", "0.9.log", "0.10.log"):
        run.log(name, name, group="master")
    for number, host in ((0, "n0"), (9, "n1"), (10, "n2")):
        run.attempt(f"41_{number}", number=number, host=host, job=f"{number}.0.0")
    run.attempt("41_9", task=1, number=3, job="9.0.0")
    for job in ("0.0.0", "9.0.0", "9.0.0"):
        run.begin(job=job)
    found = newest(run.paths, "trainer", attempts=serving(run.paths, 1))
    assert [file.path.name for file in found] == ["0.0.log"]
    for incarnation in (2, 3):
        found = newest(run.paths, attempts=serving(run.paths, incarnation))
        assert [(file.label, file.path.name) for file in found] == [
            ("master/0", "0.9.log"),
            ("trainer/0", "0.9.log"),
            ("trainer/1", "1.3.log"),
        ]
    with pytest.raises(UnknownNameError, match="incarnation 4 has not begun"):
        serving(run.paths, 4)
