"""Files of tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure, OwnershipError, UsageError
from slurmrl.fsio import inputs


def private(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_variables_are_read_as_by_a_shell(tmp_path: Path) -> None:
    text = "# mine\n\nWANDB_API_KEY=a=b\nexport HF_TOKEN='$x \"y\"' # there\nEMPTY=\n"
    assert inputs.read_variables(private(tmp_path, text)) == {
        "WANDB_API_KEY": "a=b",
        "HF_TOKEN": '$x "y"',
        "EMPTY": "",
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_file_readable_by_others_is_rejected(tmp_path: Path, mode: int) -> None:
    with pytest.raises(OwnershipError, match="chmod 600"):
        inputs.read_variables(private(tmp_path, "A=secret\n", mode))


def test_file_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = private(tmp_path, "A=secret\n")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(OwnershipError, match="belongs to user"):
        inputs.read_variables(path)


@pytest.mark.parametrize(
    "line",
    ["secret", "A='secret", "1A=secret", "SLURM_CONF=secret", "A B", "A=\0", "PYTHONPATH=/secret"],
)
def test_invalid_line_is_rejected_without_printing_it(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="tokens:2") as refused:
        inputs.read_variables(private(tmp_path, f"OK=1\n{line}\n"))
    assert "secret" not in str(refused.value)


def test_fifo_and_device_are_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(UsageError, match=f"{path} is not a regular file"):
            inputs.read_variables(path)


def test_missing_variables_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="tokens"):
        inputs.read_variables(tmp_path / "tokens")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EnvironmentFailure):
        inputs.read_variables(tmp_path / "folder")
