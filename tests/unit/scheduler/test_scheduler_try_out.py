"""Tests of jobs that sbatch would reject, and of the directive that causes it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.batch_script import Rejection, expected_start, rejections
from slurmrl.scheduler.client import SlurmClient
from tests.support.scripted_slurm import PickySlurm


def request(**slurm: object) -> SubmissionRequest:
    return SubmissionRequest(
        number=1,
        uuid="0123456789abcdef",
        trial="experiment/trial",
        run=RunPaths(Path("/shared/run")),
        python="/usr/bin/python3",
        groups=(GroupRequest(name="trainer", hosts=1, workers_per_host=1, links=8),),
        options={"slurm": slurm},
    )


def test_each_rejected_directive_is_named() -> None:
    client = PickySlurm(
        {"--frob": "unrecognized option", "--qos": "qos", "--constraint": "feature"}
    )
    slurm = {"qos": "x", "constraint": "fast", "extra_lines": ["--exclusive", "--frob"]}
    found = list(rejections(client, request(**slurm)))
    assert [(one.words, one.directive) for one in found] == [
        ("unrecognized option", "#SBATCH --frob"),
        ("qos", "qos"),
        ("feature", "constraint"),
    ]


def test_no_directive_is_named_if_no_single_one_is_the_cause() -> None:
    found = list(
        rejections(PickySlurm({"": "Requested node configuration is not available"}), request())
    )
    assert [(one.directive, one.unclear, one.waits) for one in found] == [("", True, False)]


@pytest.mark.parametrize(
    "words",
    [
        "allocation failure: Requested nodes are busy",
        "Required node not available (down, drained or reserved)",
        "allocation failure: Required partition not available (inactive or drain)",
    ],
)
def test_busy_hosts_are_no_rejection(words: str) -> None:
    assert Rejection("trainer", words).waits


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("exit 0", None),
        ("echo 'allocation failure: Invalid qos' >&2; exit 1", "allocation failure: Invalid qos"),
        ("echo \"sbatch: unrecognized option '--test-only'\" >&2; exit 1", None),
    ],
)
def test_client_returns_the_text_of_a_rejection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, expected: str | None
) -> None:
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\n{output}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert SlurmClient().rejection(tmp_path / "job.sh") == expected


@pytest.mark.parametrize("stream", ["2", "1"])
def test_client_returns_the_expected_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    said = "sbatch: Job 7 to start at 2026-12-01T09:30:00 using 16 processors on nodes n[1-2]"
    program = tmp_path / "sbatch"
    lines = [
        'test "$TZ" = UTC0 || exit 1',
        "echo a message of the site",
        f"echo '{said}' >&{stream}",
    ]
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = expected_start(SlurmClient(), request(), "trainer")
    assert found == datetime(2026, 12, 1, 9, 30, tzinfo=UTC)


def test_client_raises_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SchedulerError, match=re.escape("sbatch is not on PATH")):
        SlurmClient().rejection(tmp_path / "job.sh")
