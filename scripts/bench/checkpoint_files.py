#!/usr/bin/env python3
"""Measure the cost of checkpoint files: checksums, and the layout of many ranks.

scripts/bench/checkpoint_files.py [--directory DIR ...] [--mib 512] [--rounds 7] [--ranks 1024]

The script compares saving with writing and syncing the same bytes, and verifying with reading them,
in CPU seconds and in wall seconds. The modes take turns. The script shows the median of the rounds'
ratios with the minimum and the maximum. Then one rank of another layout loads a checkpoint of
--ranks ranks; only the files that it needs are made. The checkpoint has a decoder of 80 layers with
its moments: as many tensors as a large model, but small ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from slurmrl.engines.planned import Placing
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.checkpoint.manifest import read_manifest, verify, write_manifest
from slurmrl.tensors.checkpoint.shards import (
    RoleCheckpoint,
    RoleSnapshot,
    ShardHeader,
    layout_name,
    layout_text,
)
from slurmrl.tensors.checkpoint.tensors import CHUNK_BYTES, SavedFile, TensorEntry, write_tensors
from slurmrl.tensors.layout import Layout, Shard, TensorSpec, sources
from slurmrl.tensors.parallel.topology import ProcessTopology

MODEL = ModelConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
)
MOMENTS = ("", "exp_avg/", "exp_avg_sq/")
TENSOR_RANKS = 8


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return CPU seconds and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return time.process_time() - cpu, time.perf_counter() - wall


def raw_write(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for begin in range(0, len(data), CHUNK_BYTES):
        part = data[begin : begin + CHUNK_BYTES]
        while part:
            part = part[os.write(descriptor, part) :]
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(path: Path) -> None:
    buffer = bytearray(2**18)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure_checksums(where: Path, mib: int, rounds: int) -> None:
    data = np.random.default_rng(1).standard_normal(mib * 2**18).astype("<f4")
    entry = TensorEntry("w", TensorSpec(data.shape, "float32"), lambda: data)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=where) as name:
        folder = Path(name, "step")
        folder.mkdir()
        raw = folder / "raw"
        file = write_tensors(folder / "saved", [entry], {})
        write_manifest(folder, step=1, files=[file], state={})
        modes: dict[str, Callable[[], object]] = {
            "write": lambda: raw_write(raw, memoryview(data).cast("B")),
            "save": lambda: write_tensors(folder / "saved", [entry], {}),
            "read": lambda: raw_read(folder / "saved"),
            "verify": lambda: verify(folder),
        }
        taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for number in range(rounds + 1):  # the first round is a warm-up
            for mode, action in [*modes.items()][:: -1 if number % 2 else 1]:
                found = timed(action)
                if number:
                    taken[mode].append(found)
    print(f"{where}: {mib} MiB, {rounds} rounds")
    for mode, base in (("save", "write"), ("verify", "read")):
        for index, unit in enumerate(("CPU s", "s")):
            ratios = [a[index] / b[index] for a, b in zip(taken[mode], taken[base], strict=True)]
            middle = [statistics.median(pair[index] for pair in taken[m]) for m in (mode, base)]
            print(
                f"  {mode:6s} {middle[0]:.3f} {unit}, {base} {middle[1]:.3f}: "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def placing(d: int, t: int, rank: int) -> Placing:
    topology = ProcessTopology(("dp", "tp"), (d, t))
    tensor = TensorSplit(MODEL, t) if t > 1 else None
    return Placing(parameter_shapes(MODEL, "lm"), "float32", topology, rank, tensor)


def measure_ranks(where: Path, ranks: int, rounds: int) -> None:
    source = placing(ranks, 1, 0).layout(MOMENTS, copies=False)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=where) as name:
        folder = Path(name, "step")
        folder.mkdir()
        text = layout_text("actor", 1, source)
        (folder / layout_name("actor")).write_bytes(text)
        files = [
            SavedFile(f"{role}.{rank}.safetensors", 1, "xxh3_128:" + "0" * 32)
            for role in ("actor", "critic")
            for rank in range(ranks)
        ]
        write_manifest(folder, step=1, files=files, state={})
        print(f"{ranks} ranks, {len(source.tensors)} tensors, layout of {len(text) / 1e6:.2f} MB")
        for d, t in ((ranks, 1), (ranks // TENSOR_RANKS, TENSOR_RANKS), (ranks * 3 // 4, 1)):
            measure_load(folder, source, d, t, rounds)


def measure_load(folder: Path, source: Layout, d: int, t: int, rounds: int) -> None:
    """Measure how one rank of ``d`` times ``t`` ranks loads its boxes."""
    rank = d * t // 3

    def own_shards() -> tuple[Shard, ...]:
        return placing(d, t, rank).layout(MOMENTS).held_by(rank)

    def load() -> None:
        read_manifest(folder)
        checkpoint = RoleCheckpoint(folder, "actor")
        for shard in own:
            for _ in checkpoint.blocks(shard.name, shard.box):
                pass

    boxes = [timed(own_shards)[0] for _ in range(rounds)]
    own = own_shards()
    files = write_needed(folder, source, own)
    loads = [timed(load)[0] for _ in range(rounds + 1)][1:]  # the first round is a warm-up
    size = 4 * sum(shard.box.count for shard in own)
    print(
        f"  d{d}t{t}: own boxes {shown(boxes)} CPU s, {size / 1e6:.1f} MB from {len(files)} files "
        f"{shown(loads)} CPU s"
    )
    for file in files:
        (folder / file).unlink()


def write_needed(folder: Path, source: Layout, own: Sequence[Shard]) -> list[str]:
    """Write the files of the ranks that hold boxes of ``own``. Return the names of the files."""
    parts = (part for s in own for part, _ in sources(source.holders[s.name], s.box))
    names = []
    for rank in sorted({part.ranks[0] for part in parts}):
        entries = tuple(
            TensorEntry(s.name, TensorSpec(s.box.size, "float32"), partial(zeros, s.box.size))
            for s in source.held_by(rank)
        )
        snapshot = RoleSnapshot(ShardHeader("actor", rank, source.ranks, 1), entries, source)
        names.append(snapshot.write(folder)[0].name)
    return names


def zeros(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype="<f4")


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, action="append")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1024)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", flush=True)
    directories = options.directory or [Path("/tmp"), Path("/dev/shm")]
    for directory in directories:
        measure_checksums(directory, options.mib, options.rounds)
    measure_ranks(directories[0], options.ranks, options.rounds)


if __name__ == "__main__":
    main()
