from __future__ import annotations

import errno
import stat
from pathlib import Path

import numpy as np
import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure, WeightVersionError
from slurmrl.tensors.weights.format import (
    DELTA,
    MANIFEST,
    RAW,
    SAME,
    VersionId,
    VersionManifest,
    read_manifest,
    read_part,
    read_record,
    version_ids,
)
from slurmrl.tensors.weights.writer import PartWriter, publish
from tests.support.faulty import Faulty
from tests.unit.weights.runs import SHAPES, Ranks, changed, published, random_bits

ONE, TWO = VersionId(1, 1), VersionId(2, 1)


def test_manifest_names_every_tensor_once(tmp_path: Path) -> None:
    published(tmp_path, 2)
    manifest = read_manifest(tmp_path / "2.1")
    assert {name: (one.dtype, one.shape) for name, one in manifest.by_name.items()} == SHAPES
    assert (manifest.id, manifest.base, manifest.time) == (TWO, "1.1", 1e9)
    sizes = {file.name: (tmp_path / "2.1" / file.name).stat().st_size for file in manifest.files}
    assert sizes == {file.name: file.size for file in manifest.files}
    assert version_ids(tmp_path) == [ONE, TWO]


def test_other_users_cannot_read_the_files(tmp_path: Path) -> None:
    published(tmp_path / "versions", 1)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "versions").rglob("*")
    }
    assert modes.pop("1.1") == 0o700
    assert set(modes.values()) == {0o600}
    assert len(modes) == 5


def test_unchanged_tensors_take_no_bytes_and_random_tensors_their_size(tmp_path: Path) -> None:
    old = random_bits(0)
    new = dict(old)
    new["embed.weight"] = random_bits(1)["embed.weight"]
    few = old["layers.0.up.weight"].copy()
    few[:10] ^= 1
    new["layers.0.up.weight"] = few
    ranks = Ranks(tmp_path)
    ranks.publish(ONE, old)
    tensors = ranks.publish(TWO, new, ONE).by_name
    assert (tensors["embed.weight"].encoding, tensors["embed.weight"].bytes) == (RAW, 5120)
    assert tensors["layers.0.up.weight"].encoding == DELTA
    assert tensors["layers.0.up.weight"].bytes < 100
    assert (tensors["lm_head.scale"].encoding, tensors["lm_head.scale"].bytes) == (SAME, 0)


def test_part_reads_back_equal(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "1.1", 3) as writer:
        writer.add("embed.weight", *SHAPES["embed.weight"], random_bits(0)["embed.weight"])
        index = writer.finish()
    assert read_part(tmp_path / "1.1", 3) == index
    with pytest.raises(WeightVersionError, match=r"part-4\.json is missing"):
        read_part(tmp_path / "1.1", 4)


def test_abandoned_part_leaves_no_bytes(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "1.1", 0) as writer:
        writer.add("embed.weight", *SHAPES["embed.weight"], random_bits(0)["embed.weight"])
    assert list((tmp_path / "1.1").iterdir()) == []


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "close", "rename"])
def test_failed_write_on_a_full_disk_frees_its_space(operation: str, tmp_path: Path) -> None:
    sound = Faulty()
    Ranks(tmp_path / "sound", calls=sound).publish(ONE, random_bits(0))
    at = sound.names.index(operation)
    with pytest.raises(EnvironmentFailure, match="ENOSPC"):
        Ranks(tmp_path / "full", calls=Faulty(at, errno.ENOSPC)).publish(ONE, random_bits(0))
    assert list((tmp_path / "full" / "1.1").iterdir()) == []


def test_inconsistent_parts_are_rejected(tmp_path: Path) -> None:
    bits = random_bits(0)
    Ranks(tmp_path).publish(ONE, bits)
    parts = [read_part(tmp_path / "1.1", part) for part in (0, 1)]
    with pytest.raises(WeightVersionError, match="same tensor twice"):
        publish(tmp_path / "1.1", [*parts, parts[0]], ONE, None)

    ranks = Ranks(tmp_path)
    ranks.publish(ONE, bits)
    ranks.publish(TWO, changed(bits, 1), ONE)
    parts = [read_part(tmp_path / "2.1", part) for part in (0, 1)]
    with pytest.raises(WeightVersionError, match="have the bases"):
        publish(tmp_path / "2.1", parts, TWO, None)
    (tmp_path / "1.1" / MANIFEST).unlink()
    with pytest.raises(WeightVersionError, match="is missing"):
        publish(tmp_path / "2.1", parts, TWO, ONE)


def test_every_changed_manifest_byte_is_detected_or_harmless(tmp_path: Path) -> None:
    published(tmp_path, 2)
    path = tmp_path / "2.1" / MANIFEST
    right, text = read_manifest(path.parent), path.read_bytes()
    chance = np.random.default_rng(0)
    for at in chance.integers(0, len(text), 300):
        path.write_bytes(
            text[:at] + bytes([text[at] ^ int(chance.integers(1, 256))]) + text[at + 1 :]
        )
        try:
            assert read_record(path, VersionManifest) == right
        except CorruptFileError:
            continue
    for size in range(0, len(text) - 2, 97):
        path.write_bytes(text[:size])
        with pytest.raises(WeightVersionError):
            read_manifest(path.parent)


def test_manifest_of_another_version_is_rejected(tmp_path: Path) -> None:
    published(tmp_path, 2)
    (tmp_path / "2.1").rename(tmp_path / "3.1")
    with pytest.raises(WeightVersionError, match=r"has version 2\.1"):
        read_manifest(tmp_path / "3.1")
