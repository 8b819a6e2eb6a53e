"""A manifest defines exactly the content of a checkpoint."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest

from slurmrl.errors import CheckpointError, DamagedCheckpointError, EnvironmentFailure
from slurmrl.fsio.calls import SystemCalls
from slurmrl.tensors.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
    read_state,
    until_certain,
    verify,
    verify_share,
    write_manifest,
)
from slurmrl.tensors.checkpoint.tensors import BUFFER_BYTES, Checksum, SavedFile, checksum

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
    directory = tmp_path / "run" / "checkpoints" / "step"
    directory.mkdir(parents=True)
    files = []
    for name in ("actor.0.safetensors", "actor.1.safetensors"):
        (directory / name).write_bytes(name.encode() * 3)
        path = directory / name
        with path.open("rb") as file:
            files.append(SavedFile(name, path.stat().st_size, checksum(file)))
    write_manifest(directory, step=7, files=files, state=STATE)
    return directory


def test_written_manifest_reads_back_equal(checkpoint: Path) -> None:
    manifest = verify(checkpoint)
    assert manifest.step == 7
    names = [file.name for file in manifest.files]
    assert names == ["actor.0.safetensors", "actor.1.safetensors", "state.json"]
    assert read_state(checkpoint) == STATE


def test_state_is_on_disk_before_the_manifest_names_it(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    directory.mkdir()
    calls = Recorder()
    write_manifest(directory, step=1, files=[], state=STATE, calls=calls)
    order = [calls.steps.index(name) for name in ("state.json", "manifest.json")]
    assert order == sorted(order)
    assert calls.steps[: order[0]] == ["fsync"]
    assert calls.steps[-2:] == ["fsync step", f"fsync {tmp_path.name}"]


def test_all_problems_of_a_checkpoint_are_reported_at_once(checkpoint: Path) -> None:
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


def test_check_can_be_limited_to_sizes(checkpoint: Path) -> None:
    """The state is small, and a master resumes from it: its checksum is always verified."""
    path = checkpoint / "actor.0.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    assert verify(checkpoint, checksums=False).step == 7
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text.replace("20", "21"))
    with pytest.raises(DamagedCheckpointError, match=r"state\.json has another checksum"):
        verify(checkpoint, checksums=False)


def test_verification_shares_of_all_ranks_cover_every_file(checkpoint: Path) -> None:
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


def test_directory_in_place_of_a_file_is_damage(checkpoint: Path) -> None:
    path = checkpoint / "actor.0.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"actor\.0\..* cannot be read: .* dir"):
        verify(checkpoint)


def fail_reads(
    patched: pytest.MonkeyPatch, number: int, names: tuple[str, ...] = ("", MANIFEST)
) -> None:
    """Let opening fail for all files; for the manifest only if ``names`` contains it."""
    real = SystemCalls.open

    def broken(self: SystemCalls, path: Path, flags: int, mode: int = 0) -> int:
        if path.name == MANIFEST and MANIFEST not in names:
            return real(self, path, flags, mode)
        raise OSError(number, os.strerror(number))

    patched.setattr(SystemCalls, "open", broken)
    patched.setattr(SystemCalls, "sleep", lambda self, seconds: None)


NO_ANSWER = [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES]


@pytest.mark.parametrize("number", NO_ANSWER)
@pytest.mark.parametrize("names", [("",), ("", MANIFEST)])
def test_unreachable_file_is_not_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int, names: tuple[str, ...]
) -> None:
    fail_reads(monkeypatch, number, names)
    for check in (verify, lambda directory: verify_share(directory, 0, 1), read_state):
        with pytest.raises(EnvironmentFailure):
            check(checkpoint)


@pytest.mark.parametrize("level", ["step", "checkpoints", "run"])
@pytest.mark.parametrize("empty", [False, True], ids=["gone", "unmounted"])
def test_checkpoint_on_a_missing_mount_is_not_damaged(
    checkpoint: Path, level: str, empty: bool
) -> None:
    """A missing or an empty mount point proves nothing about the files on it."""
    hidden = next(path for path in (checkpoint, *checkpoint.parents) if path.name == level)
    away = hidden.rename(checkpoint.parents[2] / "away")
    if empty:
        hidden.mkdir()
    for check in (verify, lambda directory: verify_share(directory, 0, 1), read_state):
        with pytest.raises(EnvironmentFailure):
            check(checkpoint)
    if empty:
        hidden.rmdir()
    away.rename(hidden)
    assert verify(checkpoint).step == 7


def test_checkpoint_missing_next_to_others_is_damaged(checkpoint: Path) -> None:
    """A directory that lists other checkpoints shows that the missing one is gone."""
    (checkpoint.parent / "another").mkdir()
    checkpoint.rename(checkpoint.parent.parent / "elsewhere")
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        verify_share(checkpoint, 0, 1)


def test_io_errors_are_damage_only_after_a_minute(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarting file server returns EIO for a while, a broken sector always."""
    pauses: list[float] = []
    share = partial(verify_share, checkpoint, 0, 1)
    with monkeypatch.context() as patched:
        fail_reads(patched, errno.EIO, ("",))

        def recover(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                patched.undo()

        until_certain(share, recover)
    assert len(pauses) == 3
    fail_reads(monkeypatch, errno.EIO, ("",))
    with pytest.raises(DamagedCheckpointError, match="Input/output error"):
        until_certain(share, pauses.append)
    assert sum(pauses[3:]) >= 60


def test_wrong_checksum_is_damage_at_once(checkpoint: Path) -> None:
    path = checkpoint / "actor.0.safetensors"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DamagedCheckpointError):
        until_certain(partial(verify, checkpoint), pytest.fail)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("xxh3_128", "06b05ab6733a618578af5f94892f3950"),
        ("sha256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
    ],
)
def test_checksum_kinds_give_known_values(kind: str, expected: str) -> None:
    """Other versions must compute the same checksums."""
    assert checksum(BytesIO(b"abc"), kind) == f"{kind}:{expected}"
    parts = Checksum(kind=kind)
    for part in (b"a", memoryview(b"bc")):
        parts.update(part)
    assert str(parts) == f"{kind}:{expected}"


@pytest.mark.parametrize("kind", ["xxh3_128", "sha256"])
def test_changed_byte_is_detected_anywhere_in_a_large_file(tmp_path: Path, kind: str) -> None:
    content = bytearray(b"0123456789abcdef" * 2**16)
    path = tmp_path / "actor.0"
    file = SavedFile(path.name, len(content), checksum(BytesIO(content), kind))
    write_manifest(tmp_path, step=1, files=[file], state={})
    path.write_bytes(content)
    verify(tmp_path)
    for at in (0, BUFFER_BYTES - 1, BUFFER_BYTES, len(content) - 1):
        content[at] ^= 4
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"actor\.0 has another checksum"):
            verify(tmp_path)
        content[at] ^= 4


def test_unknown_checksum_kind_is_damage(tmp_path: Path) -> None:
    (tmp_path / "actor.0").write_bytes(b"abc")
    file = SavedFile("actor.0", 3, "xxi3_128:" + "0" * 32)
    write_manifest(tmp_path, step=1, files=[file], state={})
    with pytest.raises(DamagedCheckpointError, match=r"actor\.0 has the unknown checksum 'xxi3_"):
        verify(tmp_path)


def test_manifest_of_another_version_or_form_is_rejected(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "version": 9}))
    with pytest.raises(
        CheckpointError, match="has version 9; this program reads versions 1 to 2"
    ) as caught:
        read_manifest(checkpoint)
    assert not isinstance(caught.value, DamagedCheckpointError), "a newer program can read it"
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(CheckpointError, match="has no 'step'"):
        read_manifest(checkpoint)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_manifest(checkpoint)
    path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        read_manifest(checkpoint)
