"""The wait of the first job that Slurm expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from tests.support.trials import REPOSITORY

SBATCH = """\
#!/bin/sh
for script; do :; done
grep -q -e "--time=01:00:00" "$script" && start="+2 hours" || start="+30 hours"
date -d "$start" "+sbatch: Job 7 to start at %Y-%m-%dT%H:%M:%S using 2 processors on n1" >&2
"""
ARGUMENTS = (
    "simulate",
    str(REPOSITORY / "examples/sft.yaml"),
    "cluster.scheduler=slurm",
    "--step-seconds=20",
    "--evaluation-seconds=2",
    "--runs=1",
    "--first-wait=slurm",
)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "sbatch"
    program.write_text(SBATCH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def test_slurm_is_asked_once_for_each_time_limit(
    sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    limits = "--time-limit=01:00:00,2-00"
    assert main([*ARGUMENTS, limits, "--json", f"--root={root}"]) == 0
    found = json.loads(capsys.readouterr().out)["time_limits"]
    waits = [limit["parts"]["queue"] for limit in found]
    assert waits == pytest.approx([2 * 3600, 30 * 3600], abs=1800)
    for wait, one in zip(waits, found, strict=True):
        assert f"the first job waits {wait:.0f} s" in one["queue"]
    assert not root.exists(), "nothing is submitted"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("echo 'allocation failure: Requested nodes are busy' >&2; exit 1", "nodes are busy"),
        ("exit 0", "sbatch --test-only did not name a start time; it printed: nothing"),
    ],
)
def test_missing_estimate_of_slurm_is_an_error(
    sbatch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str, message: str
) -> None:
    sbatch.write_text(f"#!/bin/sh\n{answer}\n")
    assert main([*ARGUMENTS, f"--root={tmp_path / 'root'}"]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts=3",), "leave out --hosts"),
        (("--first-wait=soon",), "such as 30m, or slurm"),
    ],
)
def test_first_wait_that_slurm_cannot_estimate_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main([*ARGUMENTS, *arguments, f"--root={tmp_path / 'root'}"]) == 2
    assert message in capsys.readouterr().err
