"""The layout file of a checkpoint, and the files that its reader opens."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.engines.role_weights import fill_saved
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
)
from slurmrl.tensors.checkpoint import shards
from slurmrl.tensors.checkpoint.manifest import open_verified, read_state, verify, write_manifest
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint, RoleSnapshot, ShardHeader
from slurmrl.tensors.checkpoint.tensors import SavedFile, TensorEntry
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec, chunk
from tests.support.faulty import Faulty, KilledError

Damage = Callable[[dict[str, Any]], Any]
RANKS = 5
SHAPE = (13, 3)
SPECS = {
    name: TensorSpec(SHAPE, "float32") for name in ("w.0", "w.1", "exp_avg/w.0", "exp_avg/w.1")
}
WHOLE = {
    name: np.arange(39, dtype="<f4").reshape(SHAPE) + 100 * n for n, name in enumerate(SPECS)
}  # fmt: skip


def snapshots(ranks: int = RANKS, step: int = 4) -> list[RoleSnapshot]:
    boxes = [chunk(SHAPE, ranks, rank) for rank in range(ranks)]
    layout = Layout.of(SPECS, [[Shard.contiguous(name, box) for name in SPECS] for box in boxes])
    return [
        RoleSnapshot(
            ShardHeader("actor", rank, ranks, step),
            tuple(
                TensorEntry(
                    name, TensorSpec(box.size, "float32"), lambda n=name, b=box: WHOLE[n][b.slices]
                )
                for name in SPECS
            ),
            layout if rank == 0 else None,
        )
        for rank, box in enumerate(boxes)
    ]


def saved(directory: Path, **options: Any) -> Path:
    files = [file for each in snapshots(**options) for file in each.write(directory)]
    write_manifest(directory, step=4, files=files, state={"step": 4})
    return directory


def test_only_needed_files_are_opened(tmp_path: Path) -> None:
    """A rank that loads its own boxes does not open files without these boxes."""
    saved(tmp_path)
    box = chunk(SHAPE, RANKS, 3)
    for rank in (0, 1, 2, 4):
        (tmp_path / f"actor.{rank}.safetensors").unlink()
    checkpoint = RoleCheckpoint(tmp_path, "actor")
    assert (checkpoint.ranks, checkpoint.step) == (RANKS, 4)
    for name in SPECS:
        assert np.array_equal(checkpoint.read(name, box), WHOLE[name][box.slices])
    with pytest.raises(CheckpointError, match=r"actor\.0\.safetensors does not exist"):
        checkpoint.read("w.0")
    with pytest.raises(CheckpointError, match="has no tensor 'other'"):
        checkpoint.read("other")
    with pytest.raises(CheckpointError, match="has no array 'rng/cpu'"):
        checkpoint.array(3, "rng/cpu")


def test_layers_and_moments_share_layout_entries_in_the_file(tmp_path: Path) -> None:
    saved(tmp_path)
    layout = json.loads((tmp_path / "actor.layout.json").read_text())["layout"]
    assert len(layout["holders"]) == 1
    assert [tensor[2] for tensor in layout["tensors"].values()] == [0] * len(SPECS)
    headers = [(tmp_path / f"actor.{rank}.safetensors").read_bytes() for rank in range(RANKS)]
    assert not any(b"pieces" in header for header in headers)


def open_files(directory: Path) -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(str(directory)) for link in links)


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may have more files than a process may open."""
    saved(tmp_path)
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    checkpoint = RoleCheckpoint(tmp_path, "actor")
    for _ in range(2):
        for name in SPECS:
            assert np.array_equal(checkpoint.read(name), WHOLE[name])
            assert open_files(tmp_path) <= 2
    arrays = {id(file.specs) for file in checkpoint._files._files.values()}
    assert len(arrays) == 2, "four files have the same arrays, the last one smaller ones"


@pytest.mark.parametrize("block", [4, 24, 10**6])
def test_a_tensor_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(shards, "BLOCK_BYTES", block)
    checkpoint = RoleCheckpoint(saved(tmp_path), "actor")
    box = Box((1, 0), (11, 2))
    target = np.zeros(box.size, dtype="<f4")
    for part, values in checkpoint.blocks("w.1", box):
        assert values.nbytes <= block
        target[part.inside(box)] = values
    assert np.array_equal(target, WHOLE["w.1"][box.slices])
    assert np.array_equal(checkpoint.read("w.1", box), target)


def test_checkpoint_reads_a_tensor_without_dimensions(tmp_path: Path) -> None:
    """Models of transformers may have such constants."""
    spec = TensorSpec((), "float32")
    layout = Layout.of({"scale": spec}, [[Shard.contiguous("scale", Box.whole(()))]])
    entry = TensorEntry("scale", spec, lambda: np.array(2.5, dtype="<f4"))
    RoleSnapshot(ShardHeader("actor", 0, 1, 1), (entry,), layout).write(tmp_path)
    checkpoint = RoleCheckpoint(tmp_path, "actor")
    assert checkpoint.read("scale") == np.float32(2.5)
    target = torch.zeros(())
    fill_saved(target, checkpoint, "scale", Box.whole(()))
    assert target == 2.5


def test_memory_for_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading needs one block in addition to the target tensor."""
    shape, count = (4096, 512), 4  # 8 MiB
    boxes = [Box((0, 128 * rank), (4096, 128)) for rank in range(count)]
    spec = TensorSpec(shape, "float32")
    layout = Layout.of({"w": spec}, [[Shard.contiguous("w", box)] for box in boxes])
    for rank, box in enumerate(boxes):
        values = np.full(box.size, rank, dtype="<f4")
        entry = TensorEntry("w", TensorSpec(box.size, "float32"), lambda v=values: v)
        RoleSnapshot(ShardHeader("actor", rank, count, 1), (entry,), layout).write(tmp_path)
    monkeypatch.setattr(shards, "BLOCK_BYTES", 2**18)
    target = np.empty(shape, dtype="<f4")
    checkpoint = RoleCheckpoint(tmp_path, "actor")
    tracemalloc.start()
    try:
        for part, values in checkpoint.blocks("w", Box.whole(shape)):
            target[part.slices] = values
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**18 + 2**17, "the old block, the new one, and small change"
    assert np.array_equal(target[7], np.repeat(np.arange(4, dtype="<f4"), 128))


VERSION_1 = Path(__file__).parent / "version1"
"""What slurmrl wrote before checkpoints had a layout file: a step of two ranks."""


def test_a_checkpoint_of_version_1_is_read(tmp_path: Path) -> None:
    old = tmp_path / "step-00000004.1"
    shutil.copytree(VERSION_1, old)
    assert [file.name for file in verify(old).files][-1] == "state.json"
    assert read_state(old) == {"step": 4}
    checkpoint = open_verified(old, "actor")
    assert (checkpoint.ranks, checkpoint.step) == (2, 4)
    for number, name in enumerate(("model.b", "exp_avg/model.b")):
        whole = np.arange(20, dtype="<f4").reshape(5, 4) + 100 * number
        assert np.array_equal(checkpoint.read(name), whole)
        box = Box((2, 1), (2, 3))
        assert np.array_equal(checkpoint.read(name, box), whole[box.slices])
    assert checkpoint.array(1, "rng/cpu").tolist() == [1, 7]


@pytest.mark.parametrize("at", [300, 540, 577])
def test_damage_in_version_1_checkpoint_is_detected(tmp_path: Path, at: int) -> None:
    old = tmp_path / "step-00000004.1"
    shutil.copytree(VERSION_1, old)
    change(old / "actor.1.safetensors", at)
    with pytest.raises(DamagedCheckpointError, match=r"actor\.1\.safetensors has another checksum"):
        open_verified(old, "actor")


def change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damaged_layout_is_detected(tmp_path: Path) -> None:
    change(saved(tmp_path) / "actor.layout.json", 40)
    for check in (verify, lambda directory: open_verified(directory, "actor")):
        with pytest.raises(DamagedCheckpointError, match=r"actor\.layout\.json has another check"):
            check(tmp_path)
    (tmp_path / "actor.layout.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"actor\.layout\.json is missing"):
        verify(tmp_path)
    with pytest.raises(CheckpointError, match=r"actor\.layout\.json does not exist"):
        RoleCheckpoint(tmp_path, "actor")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda v: v.update(version=3), "has version 3; this program reads versions 1 to 2"),
        (lambda v: v.update(role="critic"), "belongs to critic"),
        (lambda v: v.pop("step"), "has no 'step'"),
        (lambda v: v["layout"].update(ranks=4), "a rank is beyond the 4 ranks"),
        (lambda v: v["layout"].update(ranks=-1), "in 'layout'"),
        (lambda v: v["layout"]["tensors"]["w.0"].__setitem__(2, 1), "IndexError"),
        (lambda v: v["layout"]["tensors"]["w.0"].__setitem__(2, -1), "in 'layout'"),
        (lambda v: v["layout"]["tensors"]["w.0"].__setitem__(1, "float7"), "in 'layout'"),
        (lambda v: v["layout"]["tensors"]["w.0"].__setitem__(0, [39]), "another number of dims"),
        (lambda v: v["layout"]["holders"][0][1].__setitem__(1, [3]), "a box from"),
        (lambda v: v["layout"]["holders"][0][1].__setitem__(4, -1), "in 'layout'"),
        (lambda v: v["layout"]["holders"][0][1].__setitem__(3, 5), "in 'layout'"),
        (lambda v: v["layout"]["holders"][0][1].pop(), "in 'layout'"),
        (lambda v: v["layout"]["holders"][0][1].__setitem__(0, []), "no rank has the box"),
        (lambda v: v["layout"].update(holders={}), "in 'layout'"),
    ],
)
def test_invalid_layout_is_rejected(tmp_path: Path, damage: Damage, message: str) -> None:
    path = saved(tmp_path) / "actor.layout.json"
    values = json.loads(path.read_text())
    damage(values)
    path.write_text(json.dumps(values))
    with pytest.raises((CheckpointError, CorruptFileError), match=message) as caught:
        RoleCheckpoint(tmp_path, "actor")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda part: part.__setitem__(1, [4, 0]), r"'w\.0': no rank holds Box\(start=\(3, 0\)"),
        (lambda part: part.__setitem__(4, 10**6), r"'w\.0': .* exceeds a storage of 9"),
        (lambda part: part.__setitem__(5, [2**40, 1]), r"'w\.0': .* exceeds a storage of 9"),
        (lambda part: part.__setitem__(3, "other"), r"safetensors has no array 'other'"),
    ],
)
def test_layout_that_differs_from_its_files_is_rejected(
    tmp_path: Path, damage: Damage, message: str
) -> None:
    """A reader never reads beyond an array, and omits no element."""
    path = saved(tmp_path) / "actor.layout.json"
    values = json.loads(path.read_text())
    damage(values["layout"]["holders"][0][1])
    path.write_text(json.dumps(values))
    with pytest.raises((CheckpointError, CorruptFileError), match=message):
        RoleCheckpoint(tmp_path, "actor").read("w.0")


@pytest.mark.parametrize("options", [{"step": 5}, {"ranks": 4}])
def test_file_of_another_checkpoint_is_rejected(tmp_path: Path, options: dict[str, int]) -> None:
    saved(tmp_path)
    snapshots(**options)[1].write(tmp_path)
    with pytest.raises(CheckpointError, match=r"actor\.1\.safetensors has \(ranks, step\)"):
        RoleCheckpoint(tmp_path, "actor").read("w.0")


def test_files_of_a_killed_rank_are_replaced_by_the_next_writer(tmp_path: Path) -> None:
    """No part of an unfinished file remains, and no reader accepts the folder as a checkpoint."""
    for number in range(100):
        try:
            files: list[SavedFile] = snapshots()[0].write(
                tmp_path, calls=Faulty(number, killed=True)
            )
        except KilledError:
            with pytest.raises((DamagedCheckpointError, EnvironmentFailure), match="manifest"):
                verify(tmp_path)
            continue
        break
    assert number > 6, "an array each, two headers, two fsyncs"
    assert [file.name for file in files] == ["actor.0.safetensors", "actor.layout.json"]
    for file in files:
        assert (tmp_path / file.name).stat().st_size == file.size
    saved(tmp_path)
    assert np.array_equal(open_verified(tmp_path, "actor").read("w.1"), WHOLE["w.1"])
