"""Tests of messages of `slurmrl resume` if the trial's own slurmrl cannot run, and in similar
cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slurmrl
from slurmrl.cli.control import OTHER
from slurmrl.cli.main import main
from slurmrl.errors import UsageError
from tests.fake_runs import write_config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def main(:\n", "SyntaxError"),
        ("from slurmrl import nothing\n", "ImportError"),
        ("import nowhere_at_all\n", "ModuleNotFoundError"),
        ("nonsense\n", "NameError"),
        ("a\0b\n", "null bytes"),
        ("import zipfile\nzipfile.ZipFile(__file__)\n", "BadZipFile"),
    ],
)
def test_resume_names_damaged_file_of_trials_code(tmp_path: Path, text: str, words: str) -> None:
    package = tmp_path / "slurmrl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import slurmrl.cli\n")
    (package / "cli.py").write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", OTHER, "resume", "a/1"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("Error: the trial's copy of slurmrl is damaged: ")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert "--update-code" in done.stderr


@pytest.mark.parametrize("relative", [False, True])
def test_message_names_the_removed_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    relative: bool,
) -> None:
    config = "sft.yaml" if relative else str(write_config(tmp_path))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert main(["submit", config, "--scheduler", "local", "--no-check"]) == 3
    finally:
        os.chdir(tmp_path)
    assert "the current directory was removed" in capsys.readouterr().err


@pytest.mark.parametrize("config", [{"seed": 2}, 5, None])
def test_submit_rejects_an_invalid_path(config: object) -> None:
    with pytest.raises(UsageError, match="expected the path of a YAML file"):
        slurmrl.submit(config)  # type: ignore[arg-type]
