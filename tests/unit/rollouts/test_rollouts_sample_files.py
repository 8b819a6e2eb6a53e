"""Samples are read as they were written, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import EnvironmentFailure, SampleFileError
from slurmrl.rollouts.completions import Completion, Completions
from slurmrl.rollouts.sample_files import (
    PER_COMPLETION,
    PER_TOKEN,
    SCORED,
    SampleGroup,
    SampleWriter,
    read_group,
    remove_settled,
)
from tests.support.faulty import Faulty
from tests.support.sample_groups import VERSIONS, small_group

NAMES = ("3.1", "10.1", "2.2")
"""From old to new."""
TURNS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.sampled_from(NAMES)), min_size=1),
        st.floats(-8, 0, width=32),
        st.lists(st.integers(0, 9), max_size=3),
    ),
    max_size=3,
)


def made(prompt: list[int], turns: list[Any]) -> Completions:
    completions = Completions(prompt)
    for drawn, number, read in turns:
        completions.wrote(
            Completion(
                tokens=tuple(token for token, _ in drawn),
                logprobs=(number,) * len(drawn),
                versions=tuple(version for _, version in drawn),
                finish="stop",
            )
        )
        completions.reward(number)
        completions.read(read)
    completions.finished = bool(turns)
    return completions


def assert_same(found: SampleGroup, group: SampleGroup) -> None:
    assert (found.item, found.lease, found.versions) == (group.item, group.lease, group.versions)
    for name in (*PER_TOKEN, *PER_COMPLETION):
        np.testing.assert_array_equal(getattr(found, name), getattr(group, name))
        assert getattr(found, name).dtype == getattr(group, name).dtype
    for name in SCORED:
        assert getattr(found, name) == getattr(group, name)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=5), TURNS),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_sample_files_round_trip_completions(rows: list[Any], judged: bool) -> None:
    ended = [made(prompt, turns) for prompt, turns in rows]
    for number, each in enumerate(ended):
        each.failure = "" if each.turns else "why"
        each.tool_calls, each.tool_failures = 2 * number, number
    group = SampleGroup.of(7, "2.11", ended, "1.1")
    if judged:
        group = replace(
            group,
            scores=tuple(0.1 * number for number in range(len(ended))),
            parts=tuple({"right": 1 / (number + 3)} for number in range(len(ended))),
            stats={"reward_unjudged": (1.0, 3.0)},
            submission=2,
        )
    data = group.to_bytes()
    assert data == replace(group).to_bytes()
    found = SampleGroup.from_bytes(data)
    assert_same(found, group)
    start = 0
    for place, each in enumerate(ended):
        stop = start + int(found.lengths[place])
        before = [-1] * len(each.prompt)
        assert found.input_ids[start:stop].tolist() == list(each.sequence)
        drawn = [found.versions[number] if number >= 0 else "" for number in found.drawn_by]
        assert drawn[start:stop] == [*[""] * len(before), *each.versions]
        assert found.logprobs[start:stop].tolist() == [*[0] * len(before), *each.logprobs]
        assert found.turn_rewards[start:stop].tolist() == [0] * len(before) + each.rewards
        assert found.finished[place] == each.finished
        assert found.failed[place] == (not each.turns)
        assert (found.turns[place], found.prompt_lengths[place]) == (each.turns, len(each.prompt))
        assert (found.tool_calls[place], found.tool_failures[place]) == (2 * place, place)
        start = stop
    used = {name for each in ended for name in each.versions if name}
    assert found.versions == (tuple(name for name in NAMES if name in used) or ("1.1",))
    assert judged == (found.scores is not None)


def test_scores_written_by_earlier_code_are_read() -> None:
    """Earlier code omitted the number of the submission if it was 0, and empty lists."""
    judged = {"scores": [1, None], "parts": [{"right": 0.5}, {}], "stats": {"x": [1.0, 2]}}
    own = {"item": 1, "lease": "1.0", "versions": VERSIONS, "judged": judged}
    plain = small_group(1)
    arrays = {name: getattr(plain, name) for name in (*PER_TOKEN, *PER_COMPLETION)}
    found = SampleGroup.from_bytes(save(arrays, {"group": json.dumps(own)}))
    expected = (1, None), ({"right": 0.5}, {}), {"x": (1.0, 2)}, 0
    assert (found.scores, found.parts, found.stats, found.submission) == expected


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lengths": np.array([3, 1], np.int32)}, "input_ids is int32"),
        ({"turns": np.array([3], np.int32)}, "turns is int32"),
        ({"lengths": np.array([5, 0], np.int32)}, "has no tokens"),
        ({"input_ids": np.zeros(5)}, "input_ids is float64"),
        ({"logprobs": np.full(5, np.nan, np.float32)}, "not finite"),
        ({"drawn_by": np.full(5, 2, np.int32)}, "none of the versions"),
        ({"versions": VERSIONS[::-1]}, "from old to new"),
        ({"versions": ()}, "from old to new"),
        ({"scores": (1.0,), "parts": ({}, {})}, "1 scores for 2 completions"),
        ({"scores": (1.0, np.inf), "parts": ({}, {})}, "not finite"),
        ({"scores": (1, 1), "parts": ({}, {"right": np.nan})}, "not finite"),
        ({"lease": "../x"}, "lease"),
        ({"input_ids": np.full(5, -1, np.int32)}, "negative"),
    ],
)
def test_contradictory_groups_are_rejected(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(small_group(1), **change)


def test_each_reader_reads_only_its_groups(tmp_path: Path) -> None:
    groups = [small_group(item) for item in range(3)]
    stored = SampleWriter(tmp_path / "samples").write(groups)
    path = tmp_path / "samples" / stored[0].file
    data = path.read_bytes()
    for group, place in zip(groups, stored, strict=True):
        own = slice(place.offset, place.offset + place.length)
        assert load(data[own])["input_ids"][1] == group.item
        path.write_bytes(bytes(place.offset) + data[own])  # nothing else is needed
        assert_same(read_group(tmp_path / "samples", place), group)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def _shorter(path: Path, stored: StoredGroup) -> StoredGroup:
    os.truncate(path, stored.offset + stored.length - 1)
    return stored


def _missing(path: Path, stored: StoredGroup) -> StoredGroup:
    path.unlink()
    return stored


def _directory(path: Path, stored: StoredGroup) -> StoredGroup:
    path.unlink()
    path.mkdir()
    return stored


DAMAGE: dict[str, Callable[[Path, StoredGroup], StoredGroup]] = {
    "cut": _shorter,
    "missing": _missing,
    "directory": _directory,
    "checksum": lambda path, stored: replace(stored, checksum="xxh3_128:0"),
    "another item": lambda path, stored: replace(stored, item=stored.item + 1),
    "another lease": lambda path, stored: replace(stored, lease="9.9"),
    "other versions": lambda path, stored: replace(stored, versions=("1.1",)),
    "another place": lambda path, stored: replace(stored, offset=stored.offset + 1),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_sample_file_is_one_error(tmp_path: Path, kind: str) -> None:
    stored = SampleWriter(tmp_path).write([small_group(1), small_group(2)])[1]
    stored = DAMAGE[kind](tmp_path / stored.file, stored)
    with pytest.raises(SampleFileError, match=stored.file):
        read_group(tmp_path, stored)


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    [stored] = SampleWriter(tmp_path).write([small_group(1)])
    path = tmp_path / stored.file
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(SampleFileError):
            read_group(tmp_path, stored)
        with pytest.raises(SampleFileError):
            read_group(tmp_path, replace(stored, length=place))


def test_document_with_wrong_arrays_is_damage() -> None:
    for data in (b"", b"\x00" * 8, small_group(1).to_bytes()[:-1], b"\xff" * 64):
        with pytest.raises(ValueError, match=r"\w"):
            SampleGroup.from_bytes(data)


def test_reader_waits_for_a_file_not_yet_visible(tmp_path: Path) -> None:
    class Caching(Faulty):
        def caches(self, directory: Path) -> bool:
            return True

    [stored] = SampleWriter(tmp_path).write([small_group(1)])
    assert read_group(tmp_path, stored, calls=Caching(0, errno.ENOENT, times=5)).item == 1
    calls = Caching(0, errno.ENOENT, times=99)
    with pytest.raises(SampleFileError):
        read_group(tmp_path, stored, calls=calls)
    assert calls.clock.now_s > 60
    with pytest.raises(EnvironmentFailure):
        read_group(tmp_path, stored, calls=Faulty(0, errno.EACCES))


def test_groups_are_written_again_after_a_full_disk(tmp_path: Path) -> None:
    calls = Faulty()
    writer = SampleWriter(tmp_path, calls=calls)
    calls.at, calls.error = calls.count + calls_until(tmp_path, "pwrite"), errno.ENOSPC
    with pytest.raises(EnvironmentFailure, match="No space left"):
        writer.write([small_group(1)])
    assert list(tmp_path.iterdir()) == []
    [stored] = writer.write([small_group(1)])
    assert read_group(tmp_path, stored).item == 1


def test_writer_recreates_a_removed_sample_directory(tmp_path: Path) -> None:
    """A user's `rm -rf`, or a purge of empty folders, during a run."""
    folder = tmp_path / "attempt" / "samples"
    writer = SampleWriter(folder)
    for item in range(2):
        shutil.rmtree(folder)
        with pytest.raises(EnvironmentFailure, match="No such file"):
            writer.write([small_group(item)])
        [stored] = writer.write([small_group(item)])
        assert read_group(folder, stored).item == item
        assert folder.stat().st_mode & 0o777 == 0o700


def test_writer_does_not_recreate_a_removed_attempt_directory(tmp_path: Path) -> None:
    """The master has declared the attempt lost, and the agent ends the task."""
    folder = tmp_path / "attempt" / "samples"
    writer = SampleWriter(folder)
    shutil.rmtree(folder.parent)
    with pytest.raises(EnvironmentFailure, match="No such file"):
        writer.write([small_group(1)])
    assert not folder.parent.exists()


def calls_until(folder: Path, name: str) -> int:
    calls = Faulty()
    SampleWriter(folder / "other", calls=calls).write([small_group(1)])
    for path in (folder / "other").iterdir():
        path.unlink()
    (folder / "other").rmdir()
    return calls.names.index(name) - calls.names.index("open")


def test_batch_takes_as_many_operations_as_one_group(tmp_path: Path) -> None:
    calls = Faulty()
    writer = SampleWriter(tmp_path, calls=calls)
    before = calls.count
    writer.write([small_group(item) for item in range(20)])
    assert calls.names[before:] == ["open", "pwrite", "fsync", "close", "fsync_directory"]


def test_sample_files_are_removed_once_no_group_needs_them(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    names = [writer.write([small_group(item)])[0].file for item in range(5)]
    (tmp_path / "not ours").touch()
    assert remove_settled(tmp_path, {names[1]}, names[2]) == [names[0], names[2]]
    assert remove_settled(tmp_path, {names[1]}, names[2]) == []
    assert remove_settled(tmp_path, set(), None) == [names[1], names[3], names[4]]
    assert [path.name for path in tmp_path.iterdir()] == ["not ours"]
    assert remove_settled(tmp_path / "nothing", set(), None) == []
