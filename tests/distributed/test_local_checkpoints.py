"""Local trials whose checkpoints hang, fail or are damaged have the result of an undisturbed
one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import fold
from tests.support.held import NO_LIMIT, Hold
from tests.support.rotation import in_turn
from tests.support.trials import ARCHITECTURE, Site, processes, sft_config, wait_until

TRIAL = "sft/1"
HELD, STEPS = 9, 80


def config(site: Site, **checkpoint: Any) -> dict[str, Any]:
    """Return the configuration of a trial that waits at a step. Its checkpoints have 1 MB, much
    more than all other files of a run.
    """
    kept = {"every_steps": 2, "keep_last": 3, **checkpoint}
    found = Hold(site).sft(sft_config(total_steps=STEPS, checkpoint=kept))
    larger = {**ARCHITECTURE, "hidden_size": 64, "intermediate_size": 128}
    return {**found, "actor": {**found["actor"], "architecture": larger}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcome of an undisturbed run that waits for its checkpoints."""
    site = Site(tmp_path_factory.mktemp("undisturbed"))
    Hold(site).allow(NO_LIMIT)
    path = site.write("config.yaml", config(site, asynchronous=False))
    site.slurmrl("submit", str(path), "--scheduler", "local", "--wait")
    return site.outcome(TRIAL)


@contextmanager
def started(folder: Path, *options: str, **checkpoint: Any) -> Iterator[Site]:
    """Yield a trial that waits after the step `HELD`. Its remaining processes are killed at the
    end.
    """
    found = Site(folder)
    Hold(found).allow(HELD)
    path = found.write("config.yaml", config(found, **checkpoint))
    found.slurmrl("submit", str(path), "--scheduler", "local", "--detach", *options)
    try:
        yield found
    finally:
        for chain in processes(found.paths(TRIAL).run)["chain"]:
            os.kill(chain, signal.SIGKILL)  # its children end with it


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with started(tmp_path) as found:
        yield found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 96 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def happened(site: Site, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read_all(site.paths(TRIAL)) if event["kind"] == kind]


def committed(site: Site) -> list[int]:
    return [commit.step for commit in fold(History(site.paths(TRIAL).history).read()).commits]


def stop_while_it_writes(site: Site, worker: int) -> int:
    """Stop rank 1 while it writes its checkpoint file, so that the checkpoint cannot be committed.
    Return the checkpoint's step.
    """
    complete = site.paths(TRIAL).checkpoint(committed(site)[0], 1) / "actor.1.safetensors"
    size = complete.stat().st_size
    for step in range(committed(site)[-1] + 2, STEPS, 2):
        directory = site.paths(TRIAL).checkpoint(step, 1)
        Hold(site).allow(step)
        while not directory.exists() and step not in committed(site):
            time.sleep(0.0005)
        os.kill(worker, signal.SIGSTOP)
        file = directory / "actor.1.safetensors"
        if directory.exists() and (not file.exists() or file.stat().st_size < size):
            return step
        os.kill(worker, signal.SIGCONT)
    raise AssertionError("rank 1 was never stopped while it wrote its file")


@in_turn(1, 2)
def test_trial_continues_after_a_kill_during_a_checkpoint_write(
    site: Site, undisturbed: dict[str, Any]
) -> None:
    """No commit is made, and the trial resumes from the previous commit."""
    paths = site.paths(TRIAL)
    site.wait_for_step(TRIAL, HELD)
    wait_until("the commits", lambda: committed(site)[-1:] == [HELD - 1])
    worker = rank_one(paths.run)
    step = stop_while_it_writes(site, worker)
    directory = paths.checkpoint(step, 1)
    wait_until("rank 0's file", (directory / "actor.0.safetensors").exists)
    before = committed(site)
    assert before[-1] < step
    os.kill(worker, signal.SIGKILL)
    Hold(site).allow(NO_LIMIT)
    status = site.wait_for_end(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 2)
    begun = [r for r in History(paths.history).read() if r.kind is Kind.BEGIN]
    assert [record.data["base"] for record in begun] == [None, f"step-{before[-1]:08d}.1"]
    assert not directory.exists()
    assert site.outcome(TRIAL) == undisturbed


def rank_one(run: Path) -> int:
    """The pid of rank 1's worker, found by its name."""
    workers = processes(run)["worker"]
    return next(pid for pid in workers if Path(f"/proc/{pid}/comm").read_text().strip() == "rank 1")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@in_turn(0, 2)
def test_damaged_checkpoints_are_skipped(site: Site, undisturbed: dict[str, Any]) -> None:
    """The master finds a wrong size before the workers start.

    Ranks find a wrong checksum when they load, which costs a start. The run tries the newest
    commit, then an older one. It waits for a directory that is temporarily hidden, and does not
    count it as damaged.
    """
    site.wait_for_step(TRIAL, HELD)
    os.kill(processes(site.paths(TRIAL).run)["chain"][0], signal.SIGUSR2)
    Hold(site).release_after_warning(TRIAL)
    assert site.wait_for_end(TRIAL)["state"] == "INTERRUPTED"
    good, truncated, flipped = committed(site)
    for step, damage in ((truncated, cut), (flipped, flip)):
        damage(site.paths(TRIAL).checkpoint(step, 1) / "actor.1.safetensors")
    listed = site.slurmrl("checkpoints", TRIAL, code=1).stdout
    assert f"step {truncated}: checkpoint" in listed
    assert f"step {flipped}: checkpoint" in listed

    checkpoints = site.paths(TRIAL).checkpoints
    away = checkpoints.rename(site.folder / "away")
    checkpoints.mkdir(mode=0o700)
    site.slurmrl("resume", TRIAL, "--detach")
    wait_until("a master that waits for the checkpoints", lambda: waits_for(checkpoints, site))
    checkpoints.rmdir()
    away.rename(checkpoints)
    status = site.wait_for_end(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 3)
    deleted = [
        record.data
        for record in History(site.paths(TRIAL).history).read()
        if record.kind is Kind.DELETE and "reason" in record.data
    ]
    assert sorted(data["step"] for data in deleted) == [truncated, flipped]
    assert all("actor.1.safetensors" in data["reason"] for data in deleted)
    assert sorted(event["step"] for event in happened(site, "damaged")) == [truncated, flipped]
    begun = [event["base"] for event in happened(site, "begin")]
    assert begun == [None, f"step-{flipped:08d}.1", f"step-{good:08d}.1"]
    assert site.outcome(TRIAL) == undisturbed


def waits_for(checkpoints: Path, site: Site) -> bool:
    said = f"cannot check the checkpoints, will retry: cannot read {checkpoints}"
    return any(said in path.read_text() for path in site.paths(TRIAL).logs.rglob("*.log"))


class Quota:
    """A size limit keeps the ranks from writing their files."""

    said = "File too large"

    def __init__(self, site: Site) -> None:
        self._run = site.paths(TRIAL).run

    def fill(self) -> None:
        self._limit(20_000)

    def free(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, limit_bytes: int) -> None:
        for pid in processes(self._run)["worker"]:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))


class SmallDisk:
    """A disk with space for everything except a rank's file of half a megabyte."""

    said = "No space left on device (ENOSPC)"
    left_bytes = 256 * 1024

    def __init__(self, site: Site) -> None:
        self._ballast = site.folder / "ballast"

    def fill(self) -> None:
        """Fill the disk to different degrees, as an unfinished checkpoint may."""
        self._ballast.touch()
        found = os.statvfs(self._ballast.parent)
        room_bytes = found.f_bavail * found.f_frsize
        wanted = self._ballast.stat().st_size + room_bytes - self.left_bytes
        with self._ballast.open("ab") as ballast, suppress(OSError):
            if room_bytes > self.left_bytes:
                os.posix_fallocate(ballast.fileno(), 0, wanted)
            elif room_bytes < self.left_bytes // 4:
                ballast.truncate(max(0, wanted))

    def free(self) -> None:
        self._ballast.unlink()


def goes_on_without_room(
    site: Site, shortage: Quota | SmallDisk, undisturbed: dict[str, Any]
) -> None:
    """Check that the run trains to its end, warns, deletes nothing, and commits when space is
    available.
    """

    def tried_last() -> bool:
        shortage.fill()
        failed = [event["step"] for event in happened(site, "checkpoint_failed")]
        return failed.count(STEPS) >= 2

    shortage.fill()
    Hold(site).allow(NO_LIMIT)
    wait_until("the last checkpoint to be tried twice", tried_last)
    reason = happened(site, "checkpoint_failed")[-1]["reason"]
    assert shortage.said in reason
    told = site.slurmrl("status", TRIAL).stdout
    assert "checkpoints fail: rank" in told
    assert shortage.said in told
    assert all(
        record.kind is not Kind.DELETE for record in History(site.paths(TRIAL).history).read()
    )
    rows = json.loads(site.slurmrl("checkpoints", TRIAL, "--json").stdout)
    assert [row["step"] for row in rows] == committed(site)
    assert [row["problem"] for row in rows] == [None] * len(rows)
    left = {entry.name for entry in site.paths(TRIAL).checkpoints.iterdir()}
    assert left <= {f"step-{step:08d}.1" for step in (*committed(site), STEPS)}

    shortage.free()
    status = site.wait_for_end(TRIAL)
    assert (status["state"], status["incarnation"]) == ("COMPLETED", 1)
    assert site.outcome(TRIAL) == undisturbed


def test_run_continues_on_a_full_disk(small_disk: Path, undisturbed: dict[str, Any]) -> None:
    # with fewer checkpoints a deletion frees space, and the check would refuse so small a disk
    with started(small_disk, "--no-check", keep_last=STEPS) as site:
        site.wait_for_step(TRIAL, HELD)
        goes_on_without_room(site, SmallDisk(site), undisturbed)
