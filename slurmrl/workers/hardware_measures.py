"""Measurements of a rank's hardware: products, memory, collectives, a model, and the directory.

Each measurement yields points, from which `desk.measured_profile` computes a hardware profile. A
point has the minimum seconds of several repetitions, because other processes can only slow down a
repetition. For the same reason, CPU ranks with one thread measure CPU seconds. Inside a host, CPU
seconds include the threads that send and receive. Between hosts, all ranks measure wall seconds,
because a CPU is idle while the network carries data.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from slurmrl.engines.role_weights import init_tensor
from slurmrl.fsio.calls import REAL, write_new
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.tensors.ops.products import product
from slurmrl.tensors.parallel.device import Accelerator
from slurmrl.workers.hardware_sizes import MeasureSizes

Point: TypeAlias = dict[str, Any]
LEAST: Final = 3
MOST: Final = 50
"""Maximum number of repetitions of one measurement."""
SMALL_BYTES: Final = 4096
SHORT: Final = 32
"""Length of sequences that are so short that attention takes almost no time."""


@dataclass(frozen=True)
class Ranks:
    """The group of ranks in a measurement of collectives, and this rank's place in it."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    place: str
    """``host`` for ranks of one host, ``hosts`` for one rank of each host."""
    peer: int
    """Global rank of the next member."""

    @property
    def over_network(self) -> bool:
        return self.place == "hosts"


class Measures:
    """The measurements of one rank."""

    def __init__(self, sizes: MeasureSizes, accelerator: Accelerator, *, threads: int) -> None:
        self._sizes = sizes
        one_thread = accelerator.device.type == "cpu" and threads == 1
        self._clock = time.process_time if one_thread else time.perf_counter
        self._device = accelerator.device
        self._is_gpu = accelerator.device.type == "cuda"

    def device(self) -> Iterator[Point]:
        """Yield the GPU's name and memory in bytes. This point has no seconds."""
        if self._is_gpu:
            found = torch.cuda.get_device_properties(self._device)
            yield {"what": "device", "name": found.name, "bytes": found.total_memory}

    def products(self) -> Iterator[Point]:
        """Yield the seconds of square products in bfloat16 and float32."""
        for dtype in (torch.bfloat16, torch.float32):
            for side in self._sizes.sides:
                one, other = (self._random(side, side, dtype=dtype) for _ in range(2))
                seconds = self._least(partial(product, one, other))
                yield {"what": "product", "width": dtype.itemsize, "side": side, "seconds": seconds}

    def memory(self) -> Iterator[Point]:
        """Yield the seconds of a copy, of a sum, and of the product of a row and a matrix."""
        count = self._sizes.copy_bytes // 4
        one, other, out = (self._random(count) for _ in range(3))
        copied = self._least(lambda: out.copy_(one))
        yield {"what": "copy", "bytes": 8 * count, "seconds": copied}
        added = self._least(lambda: torch.add(one, other, out=out))
        yield {"what": "add", "bytes": 12 * count, "seconds": added}
        side = max(int(count**0.5), 16)
        weights, row = one[: side * side].view(side, side), self._random(1, side)
        read = self._least(lambda: torch.mm(row, weights))
        yield {"what": "row", "bytes": 4 * side * side, "seconds": read}
        if self._is_gpu:
            pinned = torch.empty(count, pin_memory=True)
            seconds = self._least(lambda: pinned.copy_(one, non_blocking=True))
            yield {"what": "host_copy", "bytes": 4 * count, "seconds": seconds}

    def model(self) -> Iterator[Point]:
        """Yield the seconds of forward passes of the built-in decoder, and of generation."""
        decoder, sizes = self._decoder(), self._sizes
        tokens = sizes.tokens
        for count, length in ((tokens, tokens), (tokens, SHORT), (1, 1)):
            ids = torch.randint(decoder.config.vocab_size, (count,), device=self._device)
            ends = torch.arange(0, count + 1, length, dtype=torch.int32)

            def forward(ids: Tensor = ids, ends: Tensor = ends, longest: int = length) -> None:
                with torch.no_grad():
                    decoder(ids, ends, longest)

            seconds = self._least(forward)
            yield {"what": "forward", "tokens": count, "length": length, "seconds": seconds}
        engine = NativeRollout(decoder, version="0.1")
        for rows in (1, sizes.rows):
            seconds = self._generated(engine, rows)
            yield {
                "what": "generate",
                "rows": rows,
                "tokens": sizes.new_tokens,
                "seconds": seconds / sizes.new_tokens,
            }

    def _decoder(self) -> Decoder:
        dtype = torch.bfloat16 if self._is_gpu else torch.float32
        decoder = build(ModelConfig.from_hf(dict(self._sizes.model)))
        state = {
            name: init_tensor(name, tuple(value.shape), decoder.config, 0)
            for name, value in decoder.state_dict().items()
        }
        decoder.load_state_dict(state)
        return decoder.to(self._device, dtype).requires_grad_(False)

    def _generated(self, engine: NativeRollout, rows: int) -> float:
        """Return the seconds in which the engine generates ``rows`` sequences of one prompt."""
        options = GenerationOptions(max_new_tokens=self._sizes.new_tokens)
        number = 0

        async def generate() -> None:
            nonlocal number
            number += 1
            keys = tuple(range(rows))
            request = GenerationRequest(
                request_id=f"{rows}-{number}",
                prompt=(1,) * 8,
                keys=keys,
                seed=number,
                step=0,
                options=options,
            )
            await engine.submit(request)

        return self._least(lambda: asyncio.run(generate()))

    def collectives(self, ranks: Ranks) -> Iterator[Point]:
        """Yield the seconds of collectives and of messages between neighbors.

        ``bytes`` is the size of the whole tensor. Each rank has a part of the tensor.
        """
        for size in self._sizes.message_bytes:
            count = max(size // 4 // ranks.size, 1)
            whole, part = self._random(count * ranks.size), self._random(count)
            for name, action in self._actions(ranks, whole, part).items():
                seconds = self._least(action, ranks)
                yield {
                    "what": name,
                    "place": ranks.place,
                    "ranks": ranks.size,
                    "bytes": whole.nbytes,
                    "seconds": seconds,
                }

    def _actions(self, ranks: Ranks, whole: Tensor, part: Tensor) -> dict[str, Callable[[], Any]]:
        group = ranks.group
        actions: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        }
        if ranks.size == 2:  # Measure one message in each direction.
            calls = (dist.send, dist.recv) if ranks.rank == 0 else (dist.recv, dist.send)
            actions["send"] = lambda: [call(whole, ranks.peer, group=group) for call in calls]
        return actions

    def sharded(self, ranks: Ranks) -> Iterator[Point]:
        """Yield the seconds of a forward pass of one token, with sharded weights."""
        if ranks.group is None:
            return
        decoder = self._decoder()
        mesh = DeviceMesh.from_group(ranks.group, self._device.type)
        fully_shard(decoder, mesh=mesh, reshard_after_forward=True)
        ids = torch.zeros(1, dtype=torch.int64, device=self._device)
        ends = torch.tensor([0, 1], dtype=torch.int32)

        def forward() -> None:
            with torch.no_grad():
                decoder(ids, ends, 1)

        seconds = self._least(forward, ranks)
        yield {"what": "sharded", "place": ranks.place, "ranks": ranks.size, "seconds": seconds}

    def overlap(self, ranks: Ranks) -> Iterator[Point]:
        """Yield the seconds of a gather, of a product, and of both at the same time."""
        count = self._sizes.message_bytes[-1] // 4 // ranks.size
        whole, part = self._random(count * ranks.size), self._random(count)
        side = self._sizes.sides[len(self._sizes.sides) // 2]
        compute = partial(product, self._random(side, side), self._random(side, side))
        gather = partial(dist.all_gather_into_tensor, whole, part, group=ranks.group)
        gathered = self._least(gather, ranks)
        repeated = torch.tensor([round(gathered / self._least(compute))], device=self._device)
        dist.all_reduce(repeated, dist.ReduceOp.MAX, group=ranks.group)
        count = min(max(int(repeated), 1), MOST)

        def multiply() -> None:
            for _ in range(count):
                compute()

        def both() -> None:
            work = gather(async_op=True)
            multiply()
            work.wait()

        yield {
            "what": "overlap",
            "gather": gathered,
            "product": self._least(multiply, ranks),
            "seconds": self._least(both, ranks),
        }

    def _random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, device=self._device).to(dtype)

    def _least(self, action: Callable[[], Any], ranks: Ranks | None = None) -> float:
        """Return the minimum seconds of an action, after one run to warm up.

        All ``ranks`` repeat the action equally often and begin each repetition together.
        """
        clock = self._clock if ranks is None or not ranks.over_network else time.perf_counter
        self._seconds(action, clock)
        first = self._seconds(action, clock)
        if ranks is not None:
            slowest = torch.tensor([first], device=self._device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=ranks.group)
            first = float(slowest)
        repetitions = min(max(int(self._sizes.point_s / max(first, 1e-9)), LEAST), MOST)
        least = float("inf")
        for _ in range(repetitions):
            if ranks is not None:
                dist.barrier(group=ranks.group)
            least = min(least, self._seconds(action, clock))
        return max(least, 1e-9)

    def _seconds(self, action: Callable[[], Any], clock: Callable[[], float]) -> float:
        self._wait()
        began = clock()
        action()
        self._wait()
        return clock() - began

    def _wait(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()


def directory(folder: Path, sizes: MeasureSizes) -> Iterator[Point]:
    """Yield the seconds to write and read small files, and to write a large file, with fsync.

    For small files, use the median instead of the minimum, because a run sees the usual speed.
    """
    data = os.urandom(SMALL_BYTES)
    created, read = [], []
    for number in range(sizes.files):
        path = folder / f"small.{number}"
        created.append(_timed(partial(write_new, path, data, True, REAL)))
        read.append(_timed(path.read_bytes))
        path.unlink()
    yield {"what": "file_create", "seconds": sorted(created)[len(created) // 2]}
    yield {"what": "file_read", "seconds": sorted(read)[len(read) // 2]}
    large = folder / "large"
    block = os.urandom(2**20)
    content = block * max(sizes.file_bytes // len(block), 1)
    seconds = _timed(lambda: write_new(large, content, True, REAL))
    large.unlink()
    yield {"what": "file_write", "bytes": len(content), "seconds": seconds}


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
