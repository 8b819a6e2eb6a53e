from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import EnvironmentFailure, WaitTimeoutError, WeightVersionError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.tensors.weights.format import DELTA, MANIFEST, VersionId, read_manifest
from slurmrl.tensors.weights.local_copy import FILE, LOCK, STATE, CopiedVersion, LocalCopy
from tests.support.faulty import Faulty
from tests.unit.weights.runs import SHAPES, Bits, Ranks, changed, published, random_bits


def held_bits(copy: CopiedVersion) -> Bits:
    file = copy.open()
    assert {name: (spec.dtype, spec.shape) for name, spec in file.specs.items()} == SHAPES
    return {name: file.flat(name).view(np.uint8).copy() for name in SHAPES}


def has(copy: CopiedVersion, bits: Bits) -> bool:
    found = held_bits(copy)
    return all(np.array_equal(found[name], bits[name]) for name in SHAPES)


def version(step: int) -> VersionId:
    return VersionId(step, 1)


class Reads(SystemCalls):
    """Records which part files are opened."""

    def __init__(self) -> None:
        self.opened: set[str] = set()

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if path.suffix == ".bin":
            self.opened.add(path.parent.name)
        return super().open(path, flags, mode)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_local_copy_equals_twenty_versions_bit_by_bit(seed: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        twenty_versions(Path(folder), seed, data)


def twenty_versions(tmp_path: Path, seed: int, data: st.DataObject) -> None:
    ranks, bits, base = Ranks(tmp_path / "versions"), random_bits(seed), None
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    for step in range(1, 21):
        whole = base is None or data.draw(st.integers(0, 5)) == 0
        ranks.publish(version(step), bits, None if whole else base)
        if data.draw(st.booleans()):
            assert copy.advance(version(step)).id == version(step)
            late = LocalCopy(tmp_path / "late", tmp_path / "versions")
            assert has(late.advance(), bits)
            assert has(copy.advance(), bits)
        base = version(step)
        bits = changed(bits, seed + step, data.draw(st.sampled_from([0.0, 0.01, 0.5])))


def test_only_new_bytes_are_read(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 6, whole_every=5)
    reads = Reads()
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions", calls=reads)
    copy.advance(version(3))
    assert reads.opened == {"1.1", "2.1", "3.1"}
    reads.opened.clear()
    assert has(copy.advance(version(4)), bits[version(4)])
    assert reads.opened == {"4.1"}
    reads.opened.clear()
    assert has(copy.advance(), bits[version(6)])
    assert reads.opened == {"6.1"}


def test_local_copy_never_returns_to_an_older_version(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 3)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    copy.advance(version(3))
    found = copy.advance(version(2))
    assert found.id == version(3)
    assert has(found, bits[version(3)])


def test_later_incarnation_replaces_rolled_back_versions(tmp_path: Path) -> None:
    published(tmp_path / "versions", 3)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    copy.advance()
    bits = random_bits(77)
    Ranks(tmp_path / "versions").publish(VersionId(2, 2), bits)
    found = copy.advance()
    assert found.id == VersionId(2, 2)
    assert has(found, bits)


def test_copy_of_another_trial_is_not_a_base(tmp_path: Path) -> None:
    published(tmp_path / "other", 2)
    LocalCopy(tmp_path / "copy", tmp_path / "other").advance()
    bits = random_bits(5)
    Ranks(tmp_path / "versions").publish(version(2), bits)
    assert has(LocalCopy(tmp_path / "copy", tmp_path / "versions").advance(version(2)), bits)


# -- damage ---------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


DAMAGE = {"cut": cut, "flipped byte": flip, "missing": Path.unlink}


@pytest.mark.parametrize("file", ["part-0.bin", MANIFEST])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("begin", [None, 2], ids=["late", "held"])
def test_damaged_version_is_skipped_until_the_next_full_version(
    begin: int | None, damage: str, file: str, tmp_path: Path
) -> None:
    bits = published(tmp_path / "versions", 6, whole_every=4)  # 1 and 5 are whole
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    if begin is not None:
        copy.advance(version(begin))
    DAMAGE[damage](tmp_path / "versions" / "3.1" / file)
    found = copy.advance(version(4))
    assert found.id == version(5)
    assert has(found, bits[version(5)])
    assert has(copy.advance(version(6)), bits[version(6)])


@pytest.mark.parametrize("damage", DAMAGE)
def test_local_copy_is_kept_without_a_later_full_version(damage: str, tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 3)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    copy.advance(version(2))
    DAMAGE[damage](tmp_path / "versions" / "3.1" / "part-1.bin")
    with pytest.raises(WeightVersionError, match=r"neither version 3\.1 nor a later version"):
        copy.advance(version(3))
    held = copy.held()
    assert held is not None
    assert held.id == version(2)
    assert has(copy.advance(), bits[version(2)]), "the newest that can be read"


def test_deleted_version_is_not_a_base(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 6, whole_every=4)
    shutil.rmtree(tmp_path / "versions" / "1.1")
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    assert has(copy.advance(version(3)), bits[version(5)])


def test_damaged_copy_is_rebuilt(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 3)
    for damage in DAMAGE.values():
        copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
        damage(copy.advance(version(2)).file)
        again = LocalCopy(tmp_path / "copy", tmp_path / "versions")
        assert has(again.advance(version(2)), bits[version(2)])
        damage(again.advance(version(2)).folder.parent / STATE)
        assert has(again.advance(version(3)), bits[version(3)])
        shutil.rmtree(tmp_path / "copy")


def test_damage_after_verification_is_detected_on_use(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 3)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    flip(copy.advance(version(2)).file)
    assert has(copy.advance(version(3)), bits[version(3)])


def test_wrong_bits_are_rejected_despite_correct_stored_bytes(tmp_path: Path) -> None:
    """The trainer's previous bits differed from those of the base version."""
    versions = tmp_path / "versions"
    old = random_bits(0)
    ranks = Ranks(versions)
    ranks.publish(version(1), old)
    other = Ranks(tmp_path / "other")
    other.publish(version(1), random_bits(1))
    new = changed(random_bits(1), 2)
    other.publish(version(2), new, version(1))
    shutil.copytree(tmp_path / "other" / "2.1", versions / "2.1")
    assert DELTA in {one.encoding for one in read_manifest(versions / "2.1").tensors}
    copy = LocalCopy(tmp_path / "copy", versions)
    with pytest.raises(WeightVersionError, match=r"of version 2\.1 has another checksum"):
        copy.advance(version(2))
    assert has(copy.advance(), old)


class Caching(SystemCalls):
    """A client that may see an old state; ``appear`` is called in each pause."""

    def __init__(self, appear: Callable[[], object]) -> None:
        self._appear = appear
        self.waited_s = 0.0

    def caches(self, directory: Path) -> bool:
        return True

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        if self.waited_s > 10:
            self._appear()


@pytest.mark.parametrize("name", [MANIFEST, "part-0.bin"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_host_waits_for_a_version_not_yet_visible(damage: str, name: str, tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 3)
    path = tmp_path / "versions" / "3.1" / name
    right = path.read_bytes()
    DAMAGE[damage](path)
    calls = Caching(partial(path.write_bytes, right))
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions", calls=calls)
    assert has(copy.advance(version(3)), bits[version(3)])
    assert 10 < calls.waited_s < 70


def test_host_does_not_wait_for_a_removed_version(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 5)
    shutil.rmtree(tmp_path / "versions" / "3.1")
    calls = Caching(lambda: None)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions", calls=calls)
    assert has(copy.advance(version(3)), bits[version(5)])
    assert calls.waited_s == 0


def test_advance_without_a_published_version_is_an_error(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    assert copy.held() is None
    with pytest.raises(WeightVersionError, match="nothing was published"):
        copy.advance()


# -- errors, kills and other processes ------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "from then on"])
def test_local_copy_survives_errors_at_any_operation(
    times: int, error: int, tmp_path: Path
) -> None:
    bits = published(tmp_path / "versions", 3)
    LocalCopy(tmp_path / "old", tmp_path / "versions").advance(version(2))
    sound = Faulty()
    shutil.copytree(tmp_path / "old", tmp_path / "sound")
    LocalCopy(tmp_path / "sound", tmp_path / "versions", calls=sound).advance(version(3))
    for at in range(sound.count):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", folder)
        faulty = LocalCopy(folder, tmp_path / "versions", calls=Faulty(at, error, times=times))
        try:
            assert has(faulty.advance(version(3)), bits[version(3)])
        except (EnvironmentFailure, WeightVersionError):
            held = LocalCopy(folder, tmp_path / "versions").held()
            assert held is None or has(held, bits[held.id])
        assert has(LocalCopy(folder, tmp_path / "versions").advance(version(3)), bits[version(3)])
        assert len(list(folder.iterdir())) == 3, "nothing is left over"
        shutil.rmtree(folder)


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_opening_a_replaced_version_is_an_error(left: str, tmp_path: Path) -> None:
    """A folder is empty while another process removes it."""
    bits = published(tmp_path / "versions", 3)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
    old = copy.advance(version(2))
    mapped = old.open()
    copy.advance(version(3))
    if left == "an empty folder":
        old.folder.mkdir()
    with pytest.raises(WeightVersionError, match=r"no longer at version 2\.1"):
        old.open()
    name = "embed.weight"
    assert np.array_equal(mapped.flat(name).view(np.uint8), bits[version(2)][name])


def test_two_processes_share_a_local_copy(tmp_path: Path) -> None:
    bits = published(tmp_path / "versions", 8)
    wrong: list[str] = []

    def reader(steps: list[int]) -> None:
        copy = LocalCopy(tmp_path / "copy", tmp_path / "versions")
        for step in steps:
            for _ in range(100):
                found = copy.advance(version(step))
                try:
                    right = has(found, bits[found.id])
                except WeightVersionError:  # the other one has moved on
                    continue
                if not right or found.id < version(step):
                    wrong.append(f"{found.id} for {step}")
                break
            else:
                wrong.append(f"never {step}")

    threads = [
        threading.Thread(target=reader, args=(steps,))
        for steps in ([1, 3, 5, 8], [2, 3, 6, 7], [8, 1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {path.name for path in (tmp_path / "copy").iterdir()} >= {LOCK, STATE}
    assert len(list((tmp_path / "copy").glob(f"*/{FILE}"))) == 1


def test_process_that_changes_the_copy_excludes_others(tmp_path: Path) -> None:
    published(tmp_path / "versions", 1)
    copy = LocalCopy(tmp_path / "copy", tmp_path / "versions", lock_timeout_s=0)
    other = LocalCopy(tmp_path / "copy", tmp_path / "versions", lock_timeout_s=0)
    copy.advance()
    with copy._locked(), pytest.raises(WaitTimeoutError, match="another process"):
        other.advance()
