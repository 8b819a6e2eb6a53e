from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from slurmrl.errors import EnvironmentFailure, WeightVersionError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.tensors.weights.format import MANIFEST, VersionId, VersionManifest, version_ids
from slurmrl.tensors.weights.inventory import prune, remove, superseded
from slurmrl.tensors.weights.local_copy import LocalCopy, VersionFiles, resolved
from tests.support.faulty import Faulty
from tests.unit.weights.runs import Ranks, published, random_bits


def of(*names: str) -> list[VersionManifest]:
    """Parse versions: ``3.1<2.1`` is version 3.1 as a difference from 2.1."""
    found = []
    for name in names:
        own, _, base = name.partition("<")
        found.append(VersionManifest(VersionId.parse(own), 0.0, (), (), base or None))
    return found


CHAIN = ("1.1", "2.1<1.1", "3.1", "4.1<3.1", "5.1", "6.1<5.1")


@pytest.mark.parametrize(
    ("keep_whole", "removed"),
    [(1, ["1.1", "2.1", "3.1", "4.1"]), (2, ["1.1", "2.1"]), (3, []), (9, [])],
)
def test_newest_full_versions_and_their_deltas_are_kept(
    keep_whole: int, removed: list[str]
) -> None:
    manifests = of(*CHAIN)
    found = superseded([one.id for one in manifests], manifests, keep_whole)
    assert [one.name for one in found] == removed


def test_rolled_back_versions_are_removed() -> None:
    manifests = of("8.1", "9.1<8.1", "7.2")
    assert [one.name for one in superseded([m.id for m in manifests], manifests, 1)] == [
        "8.1",
        "9.1",
    ]


def test_bases_of_kept_versions_are_kept() -> None:
    manifests = of("1.1", "2.1<1.1", "3.1", "4.1<2.1", "5.1<4.1")
    assert superseded([one.id for one in manifests], manifests, 1) == []


def test_unfinished_versions_are_removed_after_a_later_full_version() -> None:
    known = [VersionId(1, 1), VersionId(2, 1), VersionId(3, 1), VersionId(4, 1)]
    assert superseded(known, of("1.1"), 1) == []
    assert superseded(known, of("1.1", "3.1"), 1) == known[:2]
    assert superseded(known, [], 1) == []


def test_damaged_full_version_is_not_counted(tmp_path: Path) -> None:
    bits = published(tmp_path, 6, whole_every=2)
    (tmp_path / "5.1" / MANIFEST).write_bytes(b"")
    assert prune(tmp_path, 1) == [VersionId(1, 1), VersionId(2, 1)]
    held = LocalCopy(tmp_path / "copy", tmp_path).advance()
    assert held.id == VersionId(4, 1)
    assert held.id in bits


def test_removal_deletes_all_files(tmp_path: Path) -> None:
    published(tmp_path, 4, whole_every=2)
    assert [one.name for one in prune(tmp_path, 1)] == ["1.1", "2.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.1", "4.1"]
    assert prune(tmp_path, 1) == []
    remove(tmp_path, VersionId(9, 9))
    assert prune(tmp_path / "nothing", 1) == []


class Ending(SystemCalls):
    """File operations that end the process after the directory is renamed."""

    def fsync_directory(self, directory: Path) -> None:
        raise KeyboardInterrupt


def test_next_removal_completes_a_killed_removal(tmp_path: Path) -> None:
    published(tmp_path, 4, whole_every=2)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1, calls=Ending())
    assert version_ids(tmp_path) == [VersionId(step, 1) for step in (1, 3, 4)], "no base goes first"
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.1", "4.1"]


def test_failed_removal_is_repeated_the_next_time(tmp_path: Path) -> None:
    published(tmp_path / "sound", 4, whole_every=2)
    shutil.copytree(tmp_path / "sound", tmp_path / "again")
    sound = Faulty()
    prune(tmp_path / "sound", 1, calls=sound)
    for at, name in enumerate(sound.names):
        if name == "rename":
            with pytest.raises(EnvironmentFailure, match="cannot remove"):
                prune(tmp_path / "again", 1, calls=Faulty(at, 13))
    prune(tmp_path / "again", 1)
    assert version_ids(tmp_path / "again") == [VersionId(3, 1), VersionId(4, 1)]


def test_reader_of_a_removed_version_gets_correct_bits_or_an_error(tmp_path: Path) -> None:
    bits = published(tmp_path, 3, whole_every=4)
    with VersionFiles(tmp_path) as files:
        chain = files.chain(VersionId(3, 1))
        assert np.array_equal(
            resolved(files, chain, "embed.weight"), bits[VersionId(3, 1)]["embed.weight"]
        )
        Ranks(tmp_path).publish(VersionId(4, 1), random_bits(4))
        assert len(prune(tmp_path, 1)) == 3
        name = "layers.0.norm.weight"
        with pytest.raises(WeightVersionError, match="No such file"):
            resolved(files, chain, name)
        found = resolved(files, chain, "embed.weight")
        assert np.array_equal(found, bits[VersionId(3, 1)]["embed.weight"]), "its file is open"
