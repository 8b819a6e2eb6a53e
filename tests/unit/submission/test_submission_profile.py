"""A trial records the settings of its site profile, and does not read the profile again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.config.load import load_resolved
from slurmrl.desk.proposal import propose, propose_resume
from slurmrl.desk.submitting import submit
from slurmrl.desk.trials import root_folder
from slurmrl.errors import ConfigError
from slurmrl.run.paths import RunPaths
from tests.fake_runs import FakeScheduler, write_config

SITE = """\
root: {root}
cluster:
  threads_per_worker: 2
  interface: ib0
  slurm: {{partition: gpu, setup: [module load cuda]}}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: FakeScheduler) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SLURMRL_PROFILE", raising=False)
    path = tmp_path / "config/slurmrl/default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SITE.format(root=tmp_path / "site"))
    path.chmod(0o600)
    return path


def recorded(paths: RunPaths) -> dict[str, str]:
    """Return the settings that decide what a trial computes and where it runs."""
    names = (paths.config, paths.plan)
    return {path.name: path.read_text() for path in names}


def test_resumed_trial_does_not_depend_on_the_profile(tmp_path: Path, site: Path) -> None:
    submitted = submit(propose(write_config(tmp_path), (), scheduler="local"))
    paths, before = submitted.paths, recorded(submitted.paths)
    assert paths.run.is_relative_to(tmp_path / "site")
    assert root_folder(None) == tmp_path / "site"
    config = load_resolved(paths.config)
    assert config.cluster.threads_per_worker == 2
    assert config.cluster.slurm.setup == ("module load cuda",)
    record = json.loads((paths.code / "environment.json").read_text())["profile"]
    assert record["file"] == str(site)
    assert record["settings"]["cluster.slurm.partition"] == "gpu"
    for text in ("cluster: {threads_per_worker: 7, interface: eth1}", "total_steps: [", None):
        site.unlink() if text is None else site.write_text(text)
        again = propose_resume(paths, (), scheduler="local")
        assert again.settings.config == config
        assert again.settings.profile is None
    submit(again)
    assert recorded(paths) == before


@pytest.mark.parametrize("text", [None, "hardware: [", "hardware: h100", "hardware: cpu\nlike: x"])
def test_resume_continues_without_a_lost_hardware_profile(
    tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setenv("SLURMRL_PROFILE", "none")
    file, root = tmp_path / "own.yaml", str(tmp_path / "runs")
    file.write_text("hardware: cpu\n")
    overrides = ["cluster.gpus_per_worker=0", f"cluster.hardware={file}"]
    began = submit(propose(write_config(tmp_path), overrides, root=root, scheduler="local"))
    kept = propose_resume(began.paths, (), scheduler="local").settings
    assert (kept.config.cluster.hardware, kept.notes) == (str(file), ())
    file.unlink() if text is None else file.write_text(text)
    resumed = propose_resume(began.paths, (), scheduler="local").settings
    assert resumed.config.cluster.hardware is None
    [note] = resumed.notes
    assert note.startswith("cluster.hardware is ignored, because only predictions need it: ")
    assert str(file) in note
    with pytest.raises(ConfigError, match=r"cluster\.hardware|own\.yaml"):
        propose_resume(began.paths, overrides[1:], scheduler="local")


def test_command_line_options_take_precedence_over_the_profile(tmp_path: Path, site: Path) -> None:
    site.write_text(site.read_text() + "  scheduler: slurm\n")
    path = write_config(tmp_path)
    proposal = propose(path, (), root=str(tmp_path / "mine"), scheduler="local")
    assert proposal.settings.profile is not None
    assert list(proposal.settings.profile.settings) == [
        "cluster.threads_per_worker",
        "cluster.interface",
        "cluster.slurm.partition",
        "cluster.slurm.setup",
    ]
    assert proposal.settings.profile.file == site
    assert proposal.settings.config.root == str(tmp_path / "mine")
