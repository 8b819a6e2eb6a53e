from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run.lease import Lease
from slurmrl.watch.overview import name_entries
from tests.fake_runs import FakeRun


class Time:
    """A clock that moves during sleeps; a lease beats meanwhile."""

    def __init__(self, lease: Lease) -> None:
        self.now = 0.0
        self.lease = lease

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.lease.beat()

    def clock(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.submission()
    FileNameStore(run.paths.names, owner="trainer.0.0").add("a/x", "1")
    FileNameStore(run.paths.names, owner="trainer.1.0").add("a/y", "2")
    FileNameStore(run.paths.names).add("b", "3")
    return run


def test_owners_that_beat_and_owners_that_do_not(run: FakeRun) -> None:
    time = Time(Lease(run.paths.lease("trainer", 0, 0)))
    Lease(run.paths.lease("trainer", 1, 0)).beat()
    rows = {
        row["key"]: row for row in name_entries(run.paths, "", sleep=time.sleep, clock=time.clock)
    }
    assert [(key, row["value"], row["owner"]) for key, row in rows.items()] == [
        ("a/x", "1", "trainer.0.0"),
        ("a/y", "2", "trainer.1.0"),
        ("b", "3", None),
    ]
    assert [row["alive"] for row in rows.values()] == [True, False, None]
    assert rows["a/y"]["lease_age_s"] == pytest.approx(0.4)
    assert rows["b"]["lease_age_s"] is None


def test_without_owners_nothing_is_waited_for(run: FakeRun) -> None:
    def sleep(seconds: float) -> None:
        pytest.fail("slept")

    assert [row["key"] for row in name_entries(run.paths, "b", sleep=sleep)] == ["b"]
    assert name_entries(run.paths, "nothing", sleep=sleep) == []
