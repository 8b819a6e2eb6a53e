from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import load_resolved
from slurmrl.desk import proposal as module
from slurmrl.desk import trial_code
from slurmrl.desk.proposal import Proposal, prepare, propose, trial_uuid
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.plan.model import Plan
from slurmrl.run.paths import RunPaths
from tests.fake_runs import write_config


@pytest.fixture
def proposal(tmp_path: Path) -> Proposal:
    return propose(write_config(tmp_path), [], root=str(tmp_path / "runs"), scheduler="local")


def make(proposal: Proposal) -> bool:
    return prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)


def test_trial_directory_is_prepared_once(proposal: Proposal) -> None:
    assert make(proposal)
    before = paths_and_bytes(proposal)
    assert not make(proposal)
    assert paths_and_bytes(proposal) == before


def paths_and_bytes(proposal: Proposal) -> dict[Path, bytes]:
    files = (path for path in proposal.paths.run.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("step", ["take_snapshot", "figures", "dump"])
def test_killed_preparation_leaves_no_trial(
    proposal: Proposal, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trial_code if step == "take_snapshot" else module, step, kill)
        with pytest.raises(Killed):
            make(proposal)
    assert not list(proposal.paths.run.parent.iterdir())
    old = proposal.paths.run.with_name(".tmp.old")
    old.mkdir()
    os.utime(old, (0, 0))
    assert make(proposal)
    assert not old.exists()
    assert load_resolved(proposal.paths.config) == proposal.settings.config


def test_incomplete_directory_of_an_older_version_is_replaced(proposal: Proposal) -> None:
    """Older versions made the run directory at its place, and could be killed at any point."""
    paths = proposal.paths
    for directory in paths.directories():
        directory.mkdir(0o700, parents=True, exist_ok=True)
    (paths.code / "helper.py").touch()
    (paths.run / ".code.abc").mkdir()
    with pytest.raises(UsageError, match=r"add/1 is no trial but contains code: remove .* --new"):
        make(proposal)
    paths.identity.write_text('{"uuid": "old"}')
    (paths.logs / "mine").touch()
    with pytest.raises(UsageError, match="contains logs: remove the directory"):
        make(proposal)
    (paths.logs / "mine").unlink()
    assert make(proposal)
    assert trial_uuid(paths) != "old"
    assert not (paths.code / "helper.py").exists()
    assert [one.name for one in paths.run.parent.iterdir()] == ["1"]


def test_files_of_two_submitters_never_mix(
    proposal: Proposal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = write_config(tmp_path), ["actor.backend=fsdp:d2"]
    other = propose(*given, root=str(tmp_path / "runs"), scheduler="local")
    snapshot = trial_code.take_snapshot

    def late(paths: RunPaths, *arguments: Any) -> None:
        snapshot(paths, *arguments)
        monkeypatch.setattr(trial_code, "take_snapshot", snapshot)
        assert make(other)

    monkeypatch.setattr(trial_code, "take_snapshot", late)
    assert not make(proposal)
    assert load_resolved(other.paths.config).actor.backend == "fsdp:d2"
    assert Plan.read(other.paths.plan) == other.plan != proposal.plan
    assert [one.name for one in other.paths.run.parent.iterdir()] == ["1"]


def test_root_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(EnvironmentFailure, match="runs"):
        make(propose(write_config(tmp_path), [], root=str(tmp_path / "runs"), scheduler="local"))
