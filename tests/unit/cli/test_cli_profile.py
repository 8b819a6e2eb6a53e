from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fake_runs import FakeRun, write_config
from tests.unit.cli.conftest import Command


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


def test_plan_marks_values_from_the_profile(command: Command, tmp_path: Path, site: Path) -> None:
    config = str(write_config(tmp_path))
    shown = command("plan", config).out
    assert f"site profile {site}:\n  root: '/" in shown
    assert "'\n  cluster.slurm.partition: 'gpu'\n" in shown
    plan = command.json("plan", config, "cluster.slurm.partition=long", "--root", "x")
    assert plan["profile"] == {"file": str(site), "settings": {}}
    assert "site profile" not in command("plan", config, "--profile", "none").out
    assert "SLURMRL_PROFILE" not in os.environ  # the option ends with its command
    assert "did you mean 'lab'" in command("plan", config, "--profile", "lba", code=2).err


def test_a_dry_run_names_the_profile(command: Command, tmp_path: Path, site: Path) -> None:
    words = ["submit", str(write_config(tmp_path)), "--dry-run", "--no-check"]
    shown = " ".join(command(*words, "--scheduler", "local").out.split())
    assert f"site profile {site}: root, cluster.slurm.partition" in shown


def test_commands_without_a_configuration_use_the_profiles_root(
    command: Command, tmp_path: Path, site: Path
) -> None:
    FakeRun(tmp_path / "site")
    assert "add/1" in command("status", "--json").out
    assert "add/1" not in command("status", "--json", "--profile", "none").out
