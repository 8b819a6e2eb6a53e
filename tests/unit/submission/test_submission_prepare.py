from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.config.load import load_resolved
from slurmrl.desk import proposal as module
from slurmrl.desk import trial_code
from slurmrl.desk.proposal import Proposal, is_prepared, prepare, propose, trial_uuid
from slurmrl.errors import EnvironmentFailure
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


@pytest.mark.parametrize("step", ["take_snapshot", "write_plan", "dump"])
def test_killed_preparation_is_continued(
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
    assert not is_prepared(proposal.paths)
    claimed = trial_uuid(proposal.paths)
    assert make(proposal)
    assert trial_uuid(proposal.paths) == claimed
    assert load_resolved(proposal.paths.config) == proposal.settings.config


def test_existing_snapshot_is_kept(proposal: Proposal) -> None:
    make(proposal)
    marker = proposal.paths.code / "slurmrl" / "marker"
    marker.touch()
    trial_code.take_snapshot(proposal.paths, proposal.recorder.code, proposal.recorder)
    assert marker.exists()
    assert not list(proposal.paths.run.glob(".code.*"))


def test_root_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(EnvironmentFailure, match="runs"):
        make(propose(write_config(tmp_path), [], root=str(tmp_path / "runs"), scheduler="local"))
