"""Local trials whose checkpoints hang, fail or are damaged end like one that was left alone."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import fold
from slurmrl.monitor import events
from tests.support.trials import Site, kill_one, processes, sft_config, wait_until

TRIAL = "sft/1"
STEPS = 80
SMALL_BYTES = 100_000
"""Less than a rank's file."""


def config() -> dict[str, Any]:
    return sft_config(total_steps=STEPS, checkpoint={"every_steps": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcome of a run that waits for its checkpoints and that nobody disturbs."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    synchronous = sft_config(
        total_steps=STEPS, checkpoint={"every_steps": 2, "asynchronous": False}
    )
    path = site.write("config.yaml", synchronous)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--wait")
    return site.outcome(TRIAL)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A trial that has just been started; what still runs at the end is killed."""
    found = Site(tmp_path)
    path = found.write("config.yaml", config())
    found.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    yield found
    for chain in processes(found.paths(TRIAL).run)["chain"]:
        os.kill(chain, signal.SIGKILL)  # its children die with it


def happened(site: Site, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read_all(site.paths(TRIAL)) if event["kind"] == kind]


def committed(site: Site) -> list[int]:
    return [commit.step for commit in fold(History(site.paths(TRIAL).history).read()).commits]


def test_killed_while_a_checkpoint_is_written(site: Site, undisturbed: dict[str, Any]) -> None:
    """One rank's file hangs (a pipe that nobody reads): training goes on, nothing is committed,
    and a kill loses no more than the steps since the commit before."""
    directory = site.paths(TRIAL).checkpoint(4, 1)
    directory.mkdir(mode=0o700)
    os.mkfifo(directory / "actor.1.safetensors")
    site.wait_for_step(TRIAL, 6)
    wait_until("rank 0's file", (directory / "actor.0.safetensors").exists)
    assert committed(site) == [2]
    kill_one(site.paths(TRIAL).run, "worker", -1)
    status = site.wait_for_end(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 2)
    begun = [r for r in History(site.paths(TRIAL).history).read() if r.kind is Kind.BEGIN]
    assert [record.data["base"] for record in begun] == [None, "step-00000002.1"]
    assert not directory.exists()
    assert site.outcome(TRIAL) == undisturbed


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "begins"),
    [pytest.param(cut, 2, id="truncated"), pytest.param(flip, 3, id="flipped")],
)
def test_a_damaged_checkpoint_is_passed_over(
    site: Site, undisturbed: dict[str, Any], damage: Callable[[Path], None], begins: int
) -> None:
    """A size shows before anything starts; a checksum when the ranks load, which costs a start."""
    site.wait_for_step(TRIAL, 7)
    os.kill(processes(site.paths(TRIAL).run)["chain"][0], signal.SIGUSR2)
    assert site.wait_for_end(TRIAL)["state"] == "INTERRUPTED"
    before, newest = committed(site)
    directory = site.paths(TRIAL).checkpoint(newest, 1)
    damage(directory / "actor.1.safetensors")
    listed = site.slurmrl("checkpoints", TRIAL, code=1).stdout
    assert f"step {newest}: checkpoint" in listed

    site.slurmrl("resume", TRIAL, "--wait")
    status = site.status(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", begins)
    deleted = [
        record.data
        for record in History(site.paths(TRIAL).history).read()
        if record.kind is Kind.DELETE and "reason" in record.data
    ]
    assert [data["step"] for data in deleted] == [newest]
    assert "actor.1.safetensors" in deleted[0]["reason"]
    assert [event["step"] for event in happened(site, "damaged")] == [newest]
    assert [event["base"] for event in happened(site, "begin")][-1] == f"step-{before:08d}.1"
    assert site.outcome(TRIAL) == undisturbed


def limit_files(site: Site, limit_bytes: int) -> None:
    """How large a file of the ranks may get, as a quota would do it."""
    for pid in processes(site.paths(TRIAL).run)["worker"]:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


def test_checkpoints_that_cannot_be_written_leave_the_run_going(
    site: Site, undisturbed: dict[str, Any]
) -> None:
    site.wait_for_step(TRIAL, 3)
    limit_files(site, SMALL_BYTES)
    wait_until("a checkpoint that failed", lambda: happened(site, "checkpoint_failed"))
    before = committed(site)
    wait_until(
        "the last checkpoint to be tried twice",
        lambda: [event["step"] for event in happened(site, "checkpoint_failed")].count(STEPS) >= 2,
    )
    assert committed(site) == before, "the older ones are still there"
    left = {entry.name for entry in site.paths(TRIAL).checkpoints.iterdir()}
    assert left <= {f"step-{step:08d}.1" for step in (*before, STEPS)}
    rows = json.loads(site.slurmrl("checkpoints", TRIAL, "--json").stdout)
    assert [row["problem"] for row in rows] == [None] * len(before)
    assert "File too large" in happened(site, "checkpoint_failed")[0]["reason"]

    limit_files(site, resource.RLIM_INFINITY)
    status = site.wait_for_end(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 1)
    assert site.outcome(TRIAL) == undisturbed
