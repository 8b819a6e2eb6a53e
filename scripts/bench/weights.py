#!/usr/bin/env python3
"""Measure weight versions in files: the size of deltas, and the cost of publishing and reading
them.

scripts/bench/weights.py [--directory DIR ...] [--mib 256] [--rounds 5] [--steps 8]

A small decoder in float32 takes steps of AdamW on random tokens: some at a learning rate of 1e-3,
then --steps each at 1e-6 and 1e-5. After each of the later steps, its weights are published in
bfloat16. The script prints the share of changed elements, and the size of the delta divided by the
size of the weights.

Then the script publishes --mib of random weights, as a full version and as a delta with similar
changes. It updates a host's copy to each version. Both are compared with plain input and output of
the same bytes: writing and syncing, and reading and writing. All of them take turns. The script
prints MB of weights per second, and ratios of wall seconds and of CPU seconds. All results are the
median, minimum and maximum of steps or rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from spread import Spread

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.tensors.checkpoint.tensors import CHUNK_BYTES
from slurmrl.tensors.layout import Array
from slurmrl.tensors.weights.format import VersionId, VersionManifest
from slurmrl.tensors.weights.local_copy import LocalCopy
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish

MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
)
RATES = (1e-6, 1e-5)
WARM_UP = 20
SEQUENCES, LENGTH = 4, 64
TENSOR_BYTES = 32 << 20
"""Elements of a projection of a model with 7 billion parameters."""
Tensors = dict[str, tuple[tuple[int, ...], Array]]


class Publisher:
    """Return one rank and the publisher."""

    def __init__(self, versions: Path) -> None:
        self._versions = versions
        self._previous: VersionBits | None = None
        self._steps = itertools.count(1)

    def publish(self, tensors: Tensors, *, whole: bool) -> VersionManifest:
        base = None if whole else self._previous
        version = VersionId(next(self._steps), 1)
        folder = self._versions / version.name
        with PartWriter(folder, 0, base) as writer:
            for name, (shape, bits) in tensors.items():
                writer.add(name, "bfloat16", shape, bits)
            part = writer.finish()
        kept = {name: bits.copy() for name, (_, bits) in tensors.items()}
        self._previous = VersionBits(version, kept)
        return publish(folder, [part], version, None if base is None else base.version)


def trained(rate: float, steps: int) -> Iterator[Decoder]:
    """Yield the decoder before and after each step at ``rate``."""
    model = Decoder(MODEL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_tensor(name, tuple(parameter.shape), MODEL, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    chance = torch.Generator().manual_seed(1)
    bounds = torch.arange(SEQUENCES + 1, dtype=torch.int32) * LENGTH
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            optimizer.param_groups[0]["lr"] = rate
            yield model
        tokens = torch.randint(0, MODEL.vocab_size, (SEQUENCES * LENGTH,), generator=chance)
        features = model(tokens, bounds, LENGTH)
        logprobs, _ = model.logprobs(features, tokens, bounds, 1.0)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
        if step >= WARM_UP:
            yield model


def in_bfloat16(model: Decoder) -> Tensors:
    return {
        name: (
            tuple(parameter.shape),
            parameter.detach().bfloat16().view(torch.uint8).reshape(-1).numpy().copy(),
        )
        for name, parameter in model.named_parameters()
    }


def measure_sizes(where: Path, rate: float, steps: int) -> None:
    before: Tensors | None = None
    shares, ratios = [], []
    with tempfile.TemporaryDirectory(prefix="weights-", dir=where) as name:
        publisher = Publisher(Path(name))
        for model in trained(rate, steps):
            after = in_bfloat16(model)
            written = publisher.publish(after, whole=before is None)
            if before is not None:
                size = sum(bits.size for _, bits in after.values())
                changed = sum(
                    int(np.count_nonzero(bits.view("<u2") != before[one][1].view("<u2")))
                    for one, (_, bits) in after.items()
                )
                shares.append(200 * changed / size)
                ratios.append(100 * written.bytes / size)
            before = after
    print(
        f"rate {rate:g}: {Spread.of(shares).text('.1f')} % of the elements changed, "
        f"{Spread.of(ratios).text('.2f')} % of the bytes"
    )


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return wall seconds and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def raw_write(path: Path, tensors: Tensors) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for _, bits in tensors.values():
        for begin in range(0, bits.size, CHUNK_BYTES):
            os.write(descriptor, bits[begin : begin + CHUNK_BYTES].data)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_copy(source: Path, target: Path) -> None:
    """Read a file, write it elsewhere and sync it."""
    read = os.open(source, os.O_RDONLY)
    write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    while data := os.read(read, CHUNK_BYTES):
        os.write(write, data)
    os.fsync(write)
    os.close(read)
    os.close(write)


def random_weights(mib: int) -> Tensors:
    chance = np.random.default_rng(1)
    count = max((mib << 20) // TENSOR_BYTES, 1)
    shape = (4096, TENSOR_BYTES // 8192)
    values = (torch.from_numpy(chance.standard_normal((count, *shape), "<f4")) * 0.02).bfloat16()
    return {
        f"{n}.weight": (shape, one.view(torch.uint8).reshape(-1).numpy())
        for n, one in enumerate(values)
    }


def stepped(tensors: Tensors, rate: float, seed: int) -> Tensors:
    """Change each weight by plus or minus ``rate``, from a random value in the interval that rounds
    to it.
    """
    chance = np.random.default_rng(seed)
    found: Tensors = {}
    for name, (shape, bits) in tensors.items():
        old = torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
        ulp = old.abs() * 2.0**-8
        offset = torch.from_numpy(chance.random(old.numel(), "<f4") - 0.5) * ulp
        sign = torch.from_numpy(chance.integers(0, 2, old.numel()) * 2.0 - 1.0).float()
        new = (old + offset + rate * sign).bfloat16()
        found[name] = shape, new.view(torch.uint8).numpy()
    return found


def measure_throughput(where: Path, mib: int, rate: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="weights-", dir=where) as name:
        folder = Path(name)
        weights = random_weights(mib)
        size = sum(bits.size for _, bits in weights.values())
        publisher = Publisher(folder / "versions")
        publisher.publish(weights, whole=True)
        shares = []
        taken: dict[str, list[tuple[float, float]]] = {}
        for number in range(rounds + 1):  # the first round is a warm-up
            late = LocalCopy(folder / "late", folder / "versions")
            following = LocalCopy(folder / "following", folder / "versions")
            following.advance()
            weights = stepped(weights, rate, number)
            versions: list[VersionManifest] = []
            acts: dict[str, Callable[[], object]] = {
                "raw write": lambda w=weights: raw_write(folder / "raw", w),
                "publish delta": lambda w=weights, v=versions: v.append(
                    publisher.publish(w, whole=False)
                ),
                "raw copy": lambda: raw_copy(folder / "raw", folder / "copied"),
                "apply delta": following.advance,
                "publish whole": lambda w=weights: publisher.publish(w, whole=True),
                "apply whole": late.advance,
            }
            for what, action in acts.items():
                found = timed(action)
                if number:
                    taken.setdefault(what, []).append(found)
            shares.append(100 * versions[0].bytes / size)
            shutil.rmtree(folder / "late")
            for old in sorted((folder / "versions").iterdir()):
                if old.name != f"{VersionId(2 * number + 3, 1)}":
                    shutil.rmtree(old)
    print(f"{where}, rate {rate:g}: {size >> 20} MiB, differences of {Spread.of(shares).text()} %")
    for what, raw in (
        ("publish whole", "raw write"),
        ("publish delta", "raw write"),
        ("apply whole", "raw copy"),
        ("apply delta", "raw copy"),
    ):
        speed = Spread.of(size / 1e6 / seconds for seconds, _ in taken[what])
        wall, cpu = (
            Spread.of(a[unit] / b[unit] for a, b in zip(taken[what], taken[raw], strict=True))
            for unit in (0, 1)
        )
        print(
            f"  {what}: {speed.text('.0f')} MB/s, {wall.text()} times the seconds of {raw}, "
            f"{cpu.text()} times its CPU seconds"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, action="append")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", flush=True)
    directories = options.directory or [Path("/tmp"), Path("/dev/shm")]
    for rate in RATES if options.steps else ():
        measure_sizes(directories[-1], rate, options.steps)
    for directory in directories:
        for rate in RATES:
            measure_throughput(directory, options.mib, rate, options.rounds)


if __name__ == "__main__":
    main()
