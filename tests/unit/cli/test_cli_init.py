from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from slurmrl.config.source import read
from slurmrl.env import user_name
from tests.unit.cli.conftest import Command

SINFO = "main*|up|1-00:00:00|2|8|16000|gpu:2"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cluster of scripted commands. Return the file of the default profile."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    for name in ("SLURMRL_PROFILE", "SLURMRL_ROOT", "SCRATCH", "LOADEDMODULES"):
        monkeypatch.delenv(name, raising=False)
    commands = {
        "scontrol": "echo 'ClusterName = lab'",
        "sbatch": "echo slurm 24.11.5",
        "sinfo": f"echo '{SINFO}'",
        "sacctmgr": f"echo '{user_name()}|phys|phys'",
    }
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, line in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "config/slurmrl/default.yaml"


def test_init_writes_a_configuration_and_replaces_only_with_force(
    command: Command, tmp_path: Path
) -> None:
    grpo, ppo = (("init", name, "--output", "math.yaml") for name in ("grpo", "ppo"))
    assert "wrote math.yaml, math.jsonl, math_reward.py" in command(*grpo).out
    assert "exist already" in command(*grpo).out
    assert "math.yaml exists: --force replaces" in command(*ppo, code=2).err
    command(*ppo, "--force")
    assert read(tmp_path / "math.yaml").values["algorithm"]["name"] == "ppo"
    assert "did you mean 'grpo'" in command("init", "grp", code=2).err
    command("init", "grpo", "--yes", code=2)
    command("init", "site", "--output", "x.yaml", code=2)


def test_init_site_with_yes_writes_the_profile_without_questions(
    command: Command, site: Path
) -> None:
    assert "no terminal for questions: --yes" in command("init", "site", code=2).err
    output = command("init", "site", "--yes").out
    assert "found: cluster lab (Slurm 24.11.5), 1 partition\n" in output
    assert f"wrote {site}" in output
    assert read(site).values == {
        "root": "~/slurmrl-runs",
        "cluster": {"slurm": {"partition": "main", "account": "phys", "time": "1-00:00:00"}},
    }
    assert (
        "--force replaces it, --name writes another" in command("init", "site", "--yes", code=2).err
    )
    command("init", "site", "--yes", "--name", "a100")
    command("init", "site", "--yes", "--name", "../a", code=2)
    assert sorted(path.name for path in site.parent.iterdir()) == ["a100.yaml", "default.yaml"]


def test_init_site_reports_missing_slurm_information(
    command: Command, site: Path, tmp_path: Path
) -> None:
    (tmp_path / "commands/sinfo").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    (tmp_path / "commands/sacctmgr").unlink()
    os.environ["PATH"] = str(tmp_path / "commands")
    output = command("init", "site", "--yes").out
    assert "not found: the partitions: sinfo" in output
    assert "no controller" in output
    assert "not found: your accounts: sacctmgr is not on PATH" in output
    assert read(site).values == {"root": "~/slurmrl-runs"}


def test_init_site_asks_questions_in_a_terminal(site: Path) -> None:
    """The user gives another root after a rejected one, accepts the proposed partition, and names
    no account.
    """
    typed = "runs\n/shared/runs\n\n-\n90\n\nmodule load cuda; ulimit -n 4096\ny\n"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmrl", "init", "site"], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # a terminal whose last process has gone
        pass
    os.close(master)
    text = shown.decode(errors="replace")
    assert process.wait(timeout=60) == 0, text
    assert "must be an absolute path" in text
    assert read(site).values == {
        "root": "/shared/runs",
        "cluster": {
            "slurm": {
                "partition": "main",
                "time": "90",
                "setup": ["module load cuda", "ulimit -n 4096"],
            }
        },
    }
