"""Our safetensors files equal those of the safetensors package, byte by byte."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slurmrl.errors import CheckpointError, CorruptFileError, EnvironmentFailure
from slurmrl.fsio.calls import SystemCalls
from slurmrl.tensors.checkpoint.tensors import TensorEntry, TensorFile, checksum, write_tensors
from slurmrl.tensors.layout import TensorSpec

TENSORS = {
    "z": torch.randn(3, 4),
    "a": torch.randn(7).bfloat16(),
    "half": torch.randn(2, 2).half(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "naïve": torch.randn(1).double(),
    "int": torch.tensor([1, 2], dtype=torch.int32),
}


def entry(name: str, tensor: Tensor) -> TensorEntry:
    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return TensorEntry(name, spec, bits.numpy)


def entries() -> list[TensorEntry]:
    return [entry(name, tensor) for name, tensor in TENSORS.items()]


def test_file_equals_the_output_of_safetensors(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    save_file(TENSORS, theirs, {"format": "pt"})
    saved = write_tensors(ours, entries(), {"format": "pt"})
    assert ours.read_bytes() == theirs.read_bytes()
    assert (saved.name, saved.size) == ("ours", theirs.stat().st_size)
    assert saved.checksum == checksum(BytesIO(theirs.read_bytes()))
    assert ours.stat().st_mode & 0o777 == 0o600


def test_files_are_compatible_with_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, entries(), {"key": "välue"})
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, TENSORS[name])
    save_file(TENSORS, path, {"key": "välue"})
    file = TensorFile(path)
    assert file.metadata == {"key": "välue"}
    assert set(file.specs) == set(TENSORS)
    assert np.array_equal(file.flat("z").reshape(3, 4), TENSORS["z"].numpy())
    bits = TENSORS["a"].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(file.flat("a"), bits)
    assert not file.flat("a").flags.writeable
    assert file.specs["a"] == TensorSpec((7,), "bfloat16")
    assert file.flat("empty").size == 0


@pytest.mark.parametrize("keep", [0, 4, 9, 60, -1])
def test_truncated_file_is_rejected(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "file"
    write_tensors(path, entries(), {})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptFileError, match=str(path)):
        TensorFile(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(EnvironmentFailure, match=r"cannot read .*nothing: No such file"):
        TensorFile(folder / "nothing")  # a mount may be missing
    (folder / "something").touch()
    with pytest.raises(CheckpointError, match="nothing does not exist"):
        TensorFile(folder / "nothing")


class FullDisk(SystemCalls):
    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        raise OSError(28, "No space left on device")


class ShortWrites(SystemCalls):
    def __init__(self) -> None:
        self.synced = 0

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        return super().write(descriptor, data[:7])

    def fsync(self, descriptor: int) -> None:
        self.synced += 1
        super().fsync(descriptor)


def test_error_of_a_full_disk_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"write .*file.*No space left"):
        write_tensors(tmp_path / "file", entries(), {}, calls=FullDisk())


def test_short_writes_are_completed_and_the_file_is_synced(tmp_path: Path) -> None:
    calls = ShortWrites()
    saved = write_tensors(tmp_path / "file", entries(), {}, calls=calls)
    assert checksum(BytesIO((tmp_path / "file").read_bytes())) == saved.checksum
    assert calls.synced == 1
