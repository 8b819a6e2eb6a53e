"""``slurmrl profile-cluster`` with two gloo ranks, to its end and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.desk.measured_profile import Profiling, profile
from slurmrl.errors import EnvironmentFailure
from slurmrl.plan.estimates import hardware
from slurmrl.workers.hardware_sizes import MeasureSizes
from tests.support.trials import ARCHITECTURE, REPOSITORY, command_line, wait_until

TINY: Mapping[str, Any] = {
    "point_s": 0.005,
    "sides": [16, 32, 64],
    "copy_bytes": 2**20,
    "message_bytes": [1024, 65536],
    "file_bytes": 2**20,
    "files": 3,
    "tokens": 64,
    "rows": 4,
    "new_tokens": 4,
    "model": {**ARCHITECTURE, "max_position_embeddings": 128},
}


def profiling(root: Path, output: Path, **sizes: Any) -> Profiling:
    chosen = MeasureSizes(**{**TINY, **sizes})
    return Profiling(None, (), root, root, "local", None, 2, None, output, 60.0, chosen)


@pytest.fixture(autouse=True)
def _no_site_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_PROFILE", "none")


def test_two_ranks_measure_all_numbers(tmp_path: Path) -> None:
    output, said = tmp_path / "cpu.yaml", list[str]()
    assert profile(profiling(tmp_path / "runs", output), said.append) == output
    found = hardware.read_file(output)
    measured = found.measured.model_dump(exclude_none=True)
    everything = set(hardware.Numbers.model_fields)
    of_gpus = {"memory_gib", "host_link", "fused_attention", "fused_traffic"}
    of_networks = {"network", "network_latency"}
    assert everything - set(measured) == of_gpus | of_networks | {"grouped", "rest"}
    assert found.hardware == "cpu"
    assert found.made is not None
    assert "with 2 ranks each" in found.made
    assert "1 host with 2 ranks each on local" in said[0]
    assert "# Points" in output.read_text()
    assert not (tmp_path / "runs").exists(), "the job's own folder is removed"


def ranks_of(folder: Path) -> list[int]:
    """Return the processes of ranks, the lowest rank first.

    Their command names a folder below this one and the rank.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        words = command_line(int(path.name))
        if "slurmrl.workers.hardware_job" in words and str(folder) in " ".join(words):
            found |= {int(words[-2]): int(path.name)} if words[-2].isdigit() else {}
    return [pid for _, pid in sorted(found.items())]


def test_killed_rank_fails_the_command_and_keeps_the_old_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, root = tmp_path / "cpu.yaml", tmp_path / "runs"
    output.write_text("hardware: cpu\n")

    def kill(text: str) -> None:
        if "RUNNING" in text and len(ranks := ranks_of(root)) == 2:
            os.kill(ranks[1], signal.SIGKILL)

    monkeypatch.setattr("slurmrl.desk.doctor.job.SAY_EVERY_S", 0.1)
    with pytest.raises(EnvironmentFailure, match="rank 1 ended with -9"):
        profile(profiling(root, output, point_s=60.0), kill)
    assert output.read_text() == "hardware: cpu\n"
    assert os.listdir(tmp_path) == ["cpu.yaml"]
    wait_until("the other rank to end", lambda: not ranks_of(root))


KILLED = """
import json, signal, sys
from pathlib import Path
from slurmrl.desk.measured_profile import Profiling, profile
from slurmrl.workers.hardware_sizes import MeasureSizes
root, output, sizes = Path(sys.argv[1]), Path(sys.argv[2]), MeasureSizes(**json.loads(sys.argv[3]))
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
profile(Profiling(None, (), root, root, "local", None, 2, None, output, 60.0, sizes), print)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_command_cancels_its_job_when_a_signal_ends_it(tmp_path: Path, number: int) -> None:
    output, root = tmp_path / "cpu.yaml", tmp_path / "runs"
    sizes = json.dumps({**TINY, "point_s": 60.0})
    command = [sys.executable, "-c", KILLED, str(root), str(output), sizes]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        wait_until("a rank", lambda: ranks_of(root))
        process.send_signal(number)
        process.send_signal(number)  # a second signal must not stop the cancellation
        assert process.wait(60) == 128 + number
    wait_until("the ranks to end", lambda: not ranks_of(root))
    assert os.listdir(tmp_path) == [], "neither a profile nor the job's folder is left"


def test_killed_command_leaves_no_profile(tmp_path: Path) -> None:
    output, root = tmp_path / "cpu.yaml", tmp_path / "runs"
    sizes = json.dumps({**TINY, "point_s": 60.0})
    command = [sys.executable, "-c", KILLED, str(root), str(output), sizes]
    with subprocess.Popen(command, cwd=REPOSITORY) as process:
        ranks = wait_until("two ranks", lambda: len(found := ranks_of(root)) == 2 and found)
        process.kill()
    assert os.listdir(tmp_path) == ["runs"]
    for rank in ranks:  # the chain of the local scheduler outlives the command
        os.kill(rank, signal.SIGKILL)
    wait_until("the ranks to end", lambda: not ranks_of(root))
