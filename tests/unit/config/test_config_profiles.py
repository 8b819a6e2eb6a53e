"""Site profiles: selection, merging and rejected settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.config import profiles
from slurmrl.config.load import load, parse
from slurmrl.errors import ConfigError, OwnershipError, UsageError

CONFIG = """\
experiment: a
algorithm: {name: sft, batch_size: 4}
total_steps: 1
actor: {path: model}
dataset: {type: prompt_answer, path: rows.jsonl}
"""
SITE = """\
root: ~/runs
cluster:
  interface: ib0
  variables_file: secrets
  env: {NCCL_DEBUG: INFO, NCCL_IB_HCA: mlx5}
  slurm:
    partition: gpu
    account: lab
    setup: [module load cuda, module load gcc]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SLURMRL_PROFILE", raising=False)
    made = tmp_path / "config/slurmrl"
    made.mkdir(parents=True)
    return made


def write(folder: Path, name: str = "default", text: str = SITE) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_profile_is_chosen_in_documented_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert profiles.in_force() is None
    only = write(folder, "a100")
    assert profiles.in_force() == only
    write(folder, "h100")
    with pytest.raises(UsageError, match=r"several profiles.*a100, h100, none with --profile"):
        profiles.in_force()
    default = write(folder)
    assert profiles.in_force() == default
    monkeypatch.setenv("SLURMRL_PROFILE", "h100")
    assert profiles.in_force() == folder / "h100.yaml"
    monkeypatch.setenv("SLURMRL_PROFILE", "none")
    assert profiles.in_force() is None
    for name, message in [
        ("h10", "does not exist .*did you mean 'h100'"),
        ("../a100", "a name has 1 to 64"),
    ]:
        monkeypatch.setenv("SLURMRL_PROFILE", name)
        with pytest.raises(UsageError, match=message):
            profiles.in_force()


def test_other_files_in_the_profile_directory_are_ignored(folder: Path) -> None:
    for name in ("README", "old.yaml~", ".default.yaml.swp", ".hidden.yaml"):
        (folder / name).write_text("x")
    assert profiles.in_force() is None


def test_configuration_takes_precedence_key_by_key(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        CONFIG
        + """\
cluster:
  interface: null
  env: {NCCL_DEBUG: WARN}
  slurm:
    partition: long
    setup: [module load gcc]
"""
    )
    site = write(folder)
    source = load(path, ["cluster.slurm.account=other"], None, site)
    config = parse(source)
    cluster = config.cluster
    assert (cluster.interface, cluster.slurm.partition) == (None, "long")
    assert (cluster.slurm.account, cluster.slurm.setup) == ("other", ("module load gcc",))
    assert cluster.env == {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}
    assert cluster.variables_file == str(folder / "secrets")  # relative to the file that names it
    assert config.actor.path == str(tmp_path / "model")
    assert config.root == os.path.expanduser("~/runs")
    assert source.where(("cluster", "variables_file")) == f"{site}:4"
    assert source.where(("cluster", "slurm", "setup", 1)) == f"{path}:11"
    assert source.of_profile() == [
        ("cluster", "env", "NCCL_IB_HCA"),
        ("cluster", "variables_file"),
        ("root",),
    ]


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("cluster: {slurm: {partitoin: gpu}}", 1, "cluster.slurm.partitoin", "did you mean"),
        ("total_steps: 5", 1, "total_steps", "unknown key; allowed: cluster, root"),
        ("cluster:\n  hosts: many", 2, "cluster.hosts", "must be an integer"),
        ("root: runs", 1, "root", "must be an absolute path"),
        ("root: /a\nroot: /b", 2, "root", "duplicate key"),
        ("cluster: gpu", 1, "cluster", "must be a section"),
    ],
)
def test_problems_name_the_profile_and_its_line(
    folder: Path, tmp_path: Path, text: str, line: int, key: str, message: str
) -> None:
    path, site = tmp_path / "a.yaml", write(folder, text=text)
    path.write_text(CONFIG + "seed: -1\n")
    with pytest.raises(ConfigError) as caught:
        parse(load(path, (), None, site))
    own, *others = caught.value.problems
    assert (own.where, own.key) == (f"{site}:{line}", key)
    assert message in own.message
    assert [problem.key for problem in others] == ["seed"]  # reported together


def test_profile_writable_by_others_is_rejected(folder: Path, tmp_path: Path) -> None:
    path, site = tmp_path / "a.yaml", write(folder)
    path.write_text(CONFIG)
    site.chmod(0o664)
    with pytest.raises(OwnershipError, match=r"mode 0664.*chmod go-w"):
        load(path, (), None, site)
    with pytest.raises(OwnershipError, match="mode 0664"):
        profiles.root()
    site.chmod(0o644)  # other users can read it
    folder.chmod(0o777)
    with pytest.raises(OwnershipError, match="world-writable"):
        load(path, (), None, site)


def test_commands_without_a_configuration_use_the_profiles_root(folder: Path) -> None:
    assert profiles.root() is None
    write(folder)
    assert profiles.root() == os.path.expanduser("~/runs")
    write(folder, text="cluster: {interface: ib0}")
    assert profiles.root() is None
    write(folder, text="root: runs")
    with pytest.raises(ConfigError, match=r"default.yaml:1: root: 'runs' is not allowed"):
        profiles.root()
