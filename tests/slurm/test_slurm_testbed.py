"""Tests of the test bed: a second bed can run at the same time and leaves no files or processes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.scheduler.submission import ProcessId
from tests.support.beds import command
from tests.support.trials import wait_until

TIMEOUT_S = 60.0
LEAVES_A_PROCESS = """#!/bin/bash
setsid sleep 600 &
echo $! >"$1"
sleep 600
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slurm-bed-") as name:
        yield Path(name)
        command("down", "--dir", name)


def slurm(directory: Path, *command: str) -> str:
    environ = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def test_testbed_starts_and_stops(directory: Path) -> None:
    up = command("up", "--nodes", "1", "--gpus", "1", "--dir", str(directory))
    assert f"export SLURM_CONF={directory}/slurm.conf" in up.stdout, up.stderr
    assert slurm(directory, "sinfo", "-h", "-p", "main", "-o", "%D %G").split() == ["1", "gpu:1"]
    again = command("up", "--dir", str(directory))
    assert (again.returncode, "already" in again.stderr) == (1, True)
    assert "n0 idle gpu:1" in command("status", "--dir", str(directory)).stdout
    refuse_to_cut(directory)

    script, pid_file = directory / "script.sh", directory / "left.pid"
    script.write_text(LEAVES_A_PROCESS)
    slurm(directory, "sbatch", f"--output={directory}/out", str(script), str(pid_file))
    process = wait_for_process(pid_file)

    assert command("down", "--dir", str(directory)).returncode == 0
    assert not process.alive()
    assert command("status", "--dir", str(directory)).returncode == 1


def test_directory_too_long_for_a_socket_is_rejected(directory: Path) -> None:
    refused = command("up", "--dir", str(directory / ("x" * 100)))
    assert (refused.returncode, "shorter --dir" in refused.stderr) == (1, True)


def wait_for_process(file: Path) -> ProcessId:
    """The process whose pid appears in a file."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s for {file}"
        time.sleep(0.05)
    process = ProcessId.of(int(file.read_text()))
    assert process is not None
    return process


def test_killed_slurmd_is_restarted(directory: Path) -> None:
    command("up", "--nodes", "1", "--gpus", "1", "--dir", str(directory))
    daemon = ProcessId.of(int((directory / "pid" / "slurmd.n0.pid").read_text()))
    assert daemon is not None
    os.kill(daemon.pid, signal.SIGKILL)
    wait_until("slurmd to be gone", lambda: not daemon.alive())
    assert command("start", "n0", "--dir", str(directory)).returncode == 0
    wait_until("a new one", lambda: ProcessId.of(int(pid_of(directory))) not in (None, daemon))
    wait_until("the node", lambda: "idle" in slurm(directory, "sinfo", "-h", "-o", "%T").split())


def refuse_to_cut(directory: Path) -> None:
    """Nodes have no networks of their own."""
    for arguments, words in (
        (("cut", "n0"), "no networks of their own"),
        (("cut", "n7"), "cut NODE"),
        (("rename", "n0"), "rename NODE NAME"),
    ):
        refused = command(*arguments, "--dir", str(directory))
        assert (refused.returncode, words in refused.stderr) == (1, True)


def pid_of(directory: Path) -> str:
    return (directory / "pid" / "slurmd.n0.pid").read_text() or "0"
