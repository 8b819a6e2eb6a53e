from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_whole_lines_are_read_from_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(documents, "LINE_BYTES", 20)
    path = tmp_path / "a"
    path.write_bytes(b"one\n\n" + b"x" * 5000 + b"\ntwo\ntor")
    with documents.opened(path) as file:
        assert [line for line in file.forward() if len(line) < 100] == [b"one", b"", b"two"]
        assert file.offset == file.size - 3
        found = [(at, line) for at, line in file.backward() if len(line) < 100]
        assert found == [(5006, b"two"), (4, b""), (0, b"one")]
        assert next(file.backward(5000))[1] == b"two"
        assert b"".join(file.forward(5006, torn=True)) == b"twotor"
        assert file.offset == file.size


def test_fifo_and_directory_raise_instead_of_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, what in ((tmp_path / "fifo", "a FIFO"), (tmp_path, "a directory")):
        with pytest.raises(CorruptFileError, match=what), documents.opened(path):
            pass
