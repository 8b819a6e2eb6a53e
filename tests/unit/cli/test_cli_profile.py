from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmrl.cli.main import main
from tests.fake_runs import FakeRun, write_config


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SLURMRL_PROFILE", raising=False)
    monkeypatch.delenv("SLURMRL_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config/slurmrl/lab.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"root: {tmp_path}/site\ncluster: {{slurm: {{partition: gpu}}}}\n")
    path.chmod(0o600)
    return path


def test_plan_marks_values_from_the_profile(
    tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path))
    assert main(["plan", config]) == 0
    shown = capsys.readouterr().out
    assert f"site profile {site}:\n  root: '/" in shown
    assert "'\n  cluster.slurm.partition: 'gpu'\n" in shown
    assert main(["plan", config, "cluster.slurm.partition=long", "--root", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == {"file": str(site), "settings": {}}
    assert main(["plan", config, "--profile", "none"]) == 0
    assert "site profile" not in capsys.readouterr().out
    assert "SLURMRL_PROFILE" not in os.environ  # the option ends with its command
    assert main(["plan", config, "--profile", "lba"]) == 2
    assert "did you mean 'lab'" in capsys.readouterr().err


def test_a_dry_run_names_the_profile(
    tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["submit", str(write_config(tmp_path)), "--dry-run", "--no-check"]
    assert main([*command, "--scheduler", "local"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"site profile {site}: root, cluster.slurm.partition" in shown


def test_commands_without_a_configuration_use_the_profiles_root(
    tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeRun(tmp_path / "site")
    assert main(["status", "--json"]) == 0
    assert "add/1" in capsys.readouterr().out
    assert main(["status", "--json", "--profile", "none"]) == 0
    assert "add/1" not in capsys.readouterr().out
