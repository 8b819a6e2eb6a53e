from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.history.slots import Kind
from slurmrl.watch.log_files import Request
from slurmrl.watch.snapshot import DETAILED, read
from slurmrl.watch.status import assemble
from tests.fake_runs import FakeRun

SLACK = 12
"""Looks that bisection in a ten times longer history takes more, for each incarnation."""


def live(root: Path, incarnations: int) -> FakeRun:
    """Make a run with this many incarnations. Each made commits and ended in a separate job."""
    run = FakeRun(root, trial=str(incarnations))
    run.submission()
    for number in range(1, incarnations + 1):
        job = f"{number}.0.0"
        run.attempt(f"41_{number}", number=number - 1, job=job)
        run.begin(job=job, link=number)
        run.commit(2 * number)
        run.commit(2 * number + 1)
        run.name(keys.failure(number), cause="died", reason="SIGKILL")
        run.event(f"master.{number}", "ready", step=2 * number)
        run.event(f"supervisor.trainer.{number}.0", "start", hosts=["n0"])
    run.metrics(*({"step": step, "time/total": 1.0} for step in range(1, 2 * incarnations)))
    return run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the files that are opened through `fsio` or `Path.open`."""
    files: list[Any] = []
    real, real_path = os.open, Path.open

    def count(path: Any, *arguments: Any, **options: Any) -> int:
        files.append(path)
        return real(path, *arguments, **options)

    def count_path(path: Path, *arguments: Any, **options: Any) -> Any:
        files.append(path)
        return real_path(path, *arguments, **options)

    monkeypatch.setattr(os, "open", count)
    monkeypatch.setattr(Path, "open", count_path)
    return files


def test_status_reads_do_not_grow_with_the_age_of_a_trial(
    tmp_path: Path, opened: list[Any]
) -> None:
    counts = []
    for incarnations in (30, 300):
        run = live(tmp_path, incarnations)
        opened.clear()
        found = read(run.paths, DETAILED)
        counts.append(len(opened))
        assert [one.begun.number for one in found.incarnations][-1] == incarnations
        assert all(one.failure and one.supervisor and one.attempt for one in found.incarnations)
    short, long = counts
    assert long <= short + DETAILED * SLACK / 2
    opened.clear()
    read(run.paths)
    assert len(opened) < 80


def test_status_changes_no_file(tmp_path: Path) -> None:
    run = live(tmp_path, 3)
    before = {path: path.stat().st_mtime_ns for path in run.paths.run.rglob("*")}
    assemble(read(run.paths, DETAILED), [])
    assert {path: path.stat().st_mtime_ns for path in run.paths.run.rglob("*")} == before


@pytest.mark.parametrize("torn", ["", "{", '{"time": 1}', '{"time": "x", "kind": 3}', "\x00\xff"])
def test_incomplete_events_are_skipped(tmp_path: Path, torn: str) -> None:
    run = live(tmp_path, 1)
    run.paths.event_file("master.1").write_text(torn + "\n")
    run.paths.event_file("supervisor.trainer.1.0").write_text(torn)
    (traces,) = read(run.paths, DETAILED).incarnations
    assert traces.master == traces.supervisor == []
    assert assemble(read(run.paths, DETAILED), [])["incarnations"][0]["cause"] == "died"


@pytest.mark.parametrize("part", ["events", "metrics.jsonl", "plan.json", "export", "submissions"])
def test_status_works_before_all_files_exist(tmp_path: Path, part: str) -> None:
    """A submission may still be making the run directory, or a cache may show only a part of it."""
    run = live(tmp_path, 2)
    (run.paths.run / part).rename(tmp_path / "away")
    status = assemble(read(run.paths, DETAILED), [])
    assert status["state"] == "INTERRUPTED"
    assert status["incarnation"] == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"groups": 3}', "\0", '{"groups": [{}]}'])
def test_damaged_plan_is_treated_like_a_missing_plan(tmp_path: Path, text: str) -> None:
    run = live(tmp_path, 2)
    run.paths.plan.unlink()
    expected = assemble(replace(read(run.paths, DETAILED), now=0.0, free_bytes=1), [])
    run.paths.plan.write_text(text)
    assert assemble(replace(read(run.paths, DETAILED), now=0.0, free_bytes=1), []) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "plan.json is missing; restore it"),
        ('{"groups": []}', "plan.json has no trainers; restore it"),
        ("{", "plan.json is not JSON"),
    ],
)
def test_stacks_are_rejected_without_a_plan(tmp_path: Path, text: str | None, message: str) -> None:
    run = live(tmp_path, 1)
    run.paths.plan.unlink()
    if text is not None:
        run.paths.plan.write_text(text)
    with pytest.raises(CorruptFileError, match=message):
        Request.make(run.paths, 1, None)


def test_attempt_hidden_by_a_cache_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing shows a newer attempt whose file is not visible yet."""
    run = live(tmp_path, 2)
    real, hidden = NameStore.find_subtree, "attempt/trainer/0/2"

    def listing(store: NameStore, root: str) -> list[str]:
        return real(store, root) + [hidden] * hidden.startswith(root)

    monkeypatch.setattr(NameStore, "find_subtree", listing)
    status = assemble(read(run.paths, DETAILED), [])
    assert status["groups"][0]["tasks"][0]["attempt"] == 2
    assert [row["job_id"] for row in status["incarnations"]] == ["41_1", "41_2"]


def test_foreign_files_are_named(tmp_path: Path) -> None:
    run = live(tmp_path, 1)
    run.name(keys.attempt("trainer", 0, 7), attempt=3)
    with pytest.raises(CorruptFileError, match="attempt/trainer/0/7"):
        read(run.paths)


def test_message_about_a_huge_host_name_is_short(tmp_path: Path) -> None:
    run = live(tmp_path, 1)
    run.attempt("41_0", number=7, host="x" * 100_000)
    with pytest.raises(CorruptFileError, match="'host', expected the name of a file") as error:
        read(run.paths)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("field", ["tasks", "step", "phase", "metrics", "checkpoint", "doing"])
def test_null_in_published_status_counts_as_missing(tmp_path: Path, field: str) -> None:
    run = live(tmp_path, 1)
    run.say(1, **{field: None})
    assert assemble(read(run.paths, DETAILED), [])["step"] is not None


def test_export_is_found_before_later_records(tmp_path: Path) -> None:
    run = live(tmp_path, 2)
    run.paths.export(4).mkdir()
    run.append(Kind.EXPORT, step=4, directory="step-00000004")
    for step in range(10, 20):
        run.commit(step)
    assert assemble(read(run.paths), [])["export"] == str(run.paths.export(4))
