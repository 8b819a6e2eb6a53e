"""Reading objects, lines and free space."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import calls, documents
from slurmrl.fsio.calls import SystemCalls
from slurmrl.fsio.documents import COUNT, from_json, to_json


@dataclass(frozen=True)
class Wheel:
    size: Annotated[int, COUNT]
    worn: bool = False


@dataclass(frozen=True)
class Cart:
    name: str
    wheels: tuple[Wheel, ...]
    place: tuple[int, str]
    loads: Mapping[str, tuple[float, int]]
    spare: Wheel | None = None
    limit: Annotated[int, COUNT] | None = None
    speed: float = 0.0
    notes: tuple[Any, ...] = ()


CART = Cart("red", (Wheel(3), Wheel(4, worn=True)), (1, "n0"), {"hay": (0.5, 2)}, Wheel(9))
VALUES = {
    "name": "red",
    "wheels": [{"size": 3}, {"size": 4, "worn": True}],
    "place": [1, "n0"],
    "loads": {"hay": [0.5, 2]},
    "spare": {"size": 9},
}


def test_written_objects_read_back_equal() -> None:
    """Fields with their default value are not written."""
    assert json.loads(json.dumps(to_json(CART))) == VALUES
    assert from_json(Cart, VALUES, "a cart") == CART


def test_null_counts_as_missing_and_unknown_fields_are_ignored() -> None:
    wheel = from_json(Wheel, {"size": 1, "worn": None, "spokes": 12}, "a wheel")
    assert wheel == Wheel(1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": None}, "a cart has no 'name' (a string)"),
        ({"name": 3}, "a cart has 3 in 'name', expected a string"),
        ({"wheels": [{"size": "3"}]}, "in 'wheels', expected a list, each item an object with"),
        ({"wheels": [{"worn": True}]}, "in 'wheels'"),
        ({"wheels": {"size": 3}}, "in 'wheels'"),
        ({"place": [1]}, "has [1] in 'place', expected a list of an integer, a string"),
        ({"loads": {"hay": [1.0, 2, 3]}}, "in 'loads'"),
        ({"spare": {"size": -1}}, "has {'size': -1} in 'spare'"),
        ({"limit": True}, "has True in 'limit', expected an integer from 0 to"),
        ({"speed": "fast"}, "has 'fast' in 'speed', expected a number"),
    ],
)
def test_value_of_the_wrong_type_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        from_json(Cart, {**VALUES, **change}, "a cart")
    assert problem in str(caught.value)


def test_type_without_json_representation_is_rejected() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: complex

    with pytest.raises(TypeError, match="no JSON form of"):
        from_json(Odd, {"value": 1}, "here")


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


class Quota(SystemCalls):
    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_space_is_checked_by_free_bytes_and_a_trial_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.require_space(tmp_path)
    calls.require_space(tmp_path / "not" / "yet")
    with pytest.raises(EnvironmentFailure, match=r"EDQUOT.*nothing was submitted"):
        calls.require_space(tmp_path, calls=Quota())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(calls, "free_bytes", lambda directory: 5 << 20)
    with pytest.raises(EnvironmentFailure, match=r"is full: 5 MiB are free.*nothing was submitted"):
        calls.require_space(tmp_path / "not" / "yet")
