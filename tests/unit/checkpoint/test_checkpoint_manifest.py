"""A manifest says exactly what a checkpoint is."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from slurmrl.checkpoint.manifest import (
    read_manifest,
    read_state,
    verify,
    verify_share,
    write_manifest,
)
from slurmrl.checkpoint.tensors import checksum
from slurmrl.errors import CheckpointError, DamagedCheckpointError, EnvironmentFailure
from slurmrl.fsio.calls import SystemCalls

STATE = {"cursor": [1, 20], "kl_coef": 0.1}


class Recorder(SystemCalls):
    def __init__(self) -> None:
        self.steps: list[str] = []

    def rename(self, source: Path, target: Path) -> None:
        self.steps.append(target.name)
        super().rename(source, target)

    def fsync(self, descriptor: int) -> None:
        self.steps.append("fsync")
        super().fsync(descriptor)

    def fsync_directory(self, directory: Path) -> None:
        self.steps.append(f"fsync {directory.name}")
        super().fsync_directory(directory)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "step"
    directory.mkdir()
    files = []
    for name in ("actor.0.safetensors", "actor.1.safetensors"):
        (directory / name).write_bytes(name.encode() * 3)
        path = directory / name
        with path.open("rb") as file:
            files.append({"name": name, "size": path.stat().st_size, "checksum": checksum(file)})
    write_manifest(directory, step=7, files=files, state=STATE)
    return directory


def test_what_was_written_is_read(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert manifest.step == 7
    names = [file.name for file in manifest.files]
    assert names == ["actor.0.safetensors", "actor.1.safetensors", "state.json"]
    assert read_state(checkpoint) == STATE


def test_the_state_is_on_disk_before_the_manifest_names_it(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    calls = Recorder()
    write_manifest(directory, step=1, files=[], state=STATE, calls=calls)
    order = [calls.steps.index(name) for name in ("state.json", "manifest.json")]
    assert order == sorted(order)
    assert calls.steps[: order[0]] == ["fsync"]
    assert calls.steps[-2:] == ["fsync step", f"fsync {tmp_path.name}"]


def test_everything_wrong_is_named_at_once(checkpoint: Path) -> None:
    (checkpoint / "actor.0.safetensors").unlink()
    (checkpoint / "actor.1.safetensors").write_bytes(b"short")
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text.replace("20", "21"))
    with pytest.raises(CheckpointError) as caught:
        verify(checkpoint)
    message = str(caught.value)
    assert "actor.0.safetensors is missing" in message
    assert "actor.1.safetensors has 5 bytes instead of 57" in message
    assert "state.json has another checksum" in message


def test_sizes_alone_can_be_checked(checkpoint: Path) -> None:
    """But for the state's: it is small, and a master goes on from it."""
    path = checkpoint / "actor.0.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    assert verify(checkpoint, checksums=False).step == 7
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text.replace("20", "21"))
    with pytest.raises(DamagedCheckpointError, match=r"state\.json has another checksum"):
        verify(checkpoint, checksums=False)


def test_shares_of_all_ranks_are_the_whole(checkpoint: Path) -> None:
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            verify_share(checkpoint, rank, ranks)
    path = checkpoint / "actor.1.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    for ranks in (1, 2, 3, 5):
        found = []
        for rank in range(ranks):
            try:
                verify_share(checkpoint, rank, ranks)
            except DamagedCheckpointError as error:
                found.append(error)
        assert [error.directory for error in found] == ["step"]
        assert "actor.1.safetensors has another checksum" in str(found[0])


def test_a_file_that_cannot_be_read_is_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint / "actor.0.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"actor\.0\.safetensors cannot be read"):
        verify(checkpoint)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_a_directory_that_does_not_answer_is_no_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = SystemCalls.open

    def broken(self: SystemCalls, path: Path, flags: int, mode: int = 0) -> int:
        if path.name == "manifest.json":
            return real(self, path, flags, mode)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SystemCalls, "open", broken)
    with pytest.raises(EnvironmentFailure):
        verify(checkpoint)


def test_a_manifest_that_is_not_ours_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "version": 9}))
    with pytest.raises(CheckpointError, match="has version 9, this program reads 1") as caught:
        read_manifest(checkpoint)
    assert not isinstance(caught.value, DamagedCheckpointError), "a newer program can read it"
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(CheckpointError, match="has no 'step'"):
        read_manifest(checkpoint)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_manifest(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_manifest(checkpoint)
