"""Measure the operators: GAE in ns per token on a CPU, bandwidths on a GPU.

scripts/bench/ops.py [--rounds 15] [--device cpu|cuda]

Results are medians, with the minimum and the maximum in brackets.

CPU: the forms of GAE take turns on 512 sequences of 1,000 to 8,000 tokens in float32, on one
thread. The script prints ns per token of CPU time and of wall time. It also divides the CPU medians
by the medians of a numba loop and of a copy of as many numbers. (Install numba yourself, into a
separate environment.)

GPU: the script measures GAE at three shapes, gather and scatter over intervals of four sizes, and
attention over pages at three shapes. It prints shares of the bandwidth of a device-to-device copy.
It also prints how much longer GAE takes with one thread per sequence, in a kernel that nvcc
compiles at run time. Times exclude the host.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["SLURMRL_OPS"] = "native"

import torch
from spread import Spread
from torch import Tensor

from slurmrl.tensors.ops.intervals import Intervals, gather, scatter
from slurmrl.tensors.ops.native import libraries
from slurmrl.tensors.ops.paged_kernels import paged_attention
from slurmrl.tensors.ops.scan import gae_reference, packed_gae

GAMMA, LAM = 0.99, 0.95
GAE_SHAPES = ((64, 131_072), (512, 8_192), (65_536, 64))
PAGED_SHAPES = ((1, 32_768), (64, 1_024), (256, 1_024))
"""Numbers of rows and of cells per row, for one layer with the heads of Qwen2.5 1.5B."""
PAGE, HEADS, KV_HEADS, HEAD_SIZE = 16, 12, 2, 128
INTERVAL_BYTES = (16, 256, 4_096, 1 << 20)
COPIED_BYTES = 1 << 30
BATCHES = 4
BYTES_PER_TOKEN = 16
"""Bytes per token: two float32 numbers are read and two are written."""

ONE_THREAD_PER_SEQUENCE = """
extern "C" __global__ void one_thread(const float* r, const float* v, const int* cu,
                                      const bool* cut, float gamma, float lam, float* adv,
                                      float* ret, int count) {
    const int s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s >= count) return;
    float next = cut[s] ? v[cu[s + 1] + s] : 0.0f, carry = 0.0f;
    for (int t = cu[s + 1] - 1; t >= cu[s]; --t) {
        const float value = v[t + s];
        carry = r[t] + gamma * next - value + gamma * lam * carry;
        adv[t] = carry;
        ret[t] = carry + value;
        next = value;
    }
}
extern "C" void run(const float* r, const float* v, const int* cu, const bool* cut, float gamma,
                    float lam, float* adv, float* ret, int count, void* stream) {
    one_thread<<<(count + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        r, v, cu, cut, gamma, lam, adv, ret, count);
}
"""


def batch(lengths: Tensor, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    steps, sequences = int(cu_seqlens[-1]), len(lengths)
    return tuple(
        x.to(device)
        for x in (
            torch.randn(steps, generator=generator),
            torch.randn(steps + sequences, generator=generator),
            cu_seqlens,
            torch.rand(sequences, generator=generator) < 0.5,
        )
    )


def numba_loop(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, truncated: Tensor
) -> Callable[[], None]:
    """Return a plain loop, as a user would write it, compiled by numba."""
    import numba
    import numpy as np

    @numba.njit
    def loop(r, v, cu, cut, gamma, lam, adv, ret):  # type: ignore[no-untyped-def]
        for s in range(len(cu) - 1):
            carry = np.float32(0)
            behind = v[cu[s + 1] + s] if cut[s] else np.float32(0)
            for t in range(cu[s + 1] - 1, cu[s] - 1, -1):
                value = v[t + s]
                carry = r[t] + gamma * behind - value + gamma * lam * carry
                adv[t] = carry
                ret[t] = carry + value
                behind = value

    arrays = [x.numpy() for x in (rewards, values, cu_seqlens, truncated)]
    outputs = [np.empty_like(arrays[0]) for _ in range(2)]
    return lambda: loop(*arrays, np.float32(GAMMA), np.float32(LAM), *outputs)


def measure_cpu(rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = batch(torch.randint(1_000, 8_001, (512,), generator=generator))
    target = torch.empty_like(packed[0])
    forms: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(packed[0]),
        "slurmrl, compiled": lambda: packed_gae(*packed, GAMMA, LAM),
        SLOW: lambda: gae_reference(*packed, GAMMA, LAM),
    }
    try:
        forms["numba"] = numba_loop(*packed)
    except ImportError:
        print("numba is not installed: its line is left out")
    tokens = len(packed[0])
    print(f"CPU: {tokens} tokens, 512 sequences, float32, load {os.getloadavg()[0]:.1f}")
    wall_of_one: dict[str, float] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found = {name: times[1:] for name, times in in_turn(forms, rounds, tokens).items()}
        for name, rounds_ns in found.items():
            cpu, wall = (Spread.of(column) for column in zip(*rounds_ns, strict=True))
            line = f"{threads} threads  {name:18} cpu {cpu.text()}  wall {wall.text()}"
            if threads == 1:
                wall_of_one[name] = wall.least
                line += ratios(cpu.median, found)
            else:
                line += f"  {wall_of_one[name] / wall.least:.2f} x as fast as one thread (least)"
            print(line)


SLOW = "slurmrl, torch"
"""Form that takes as long as thirty other forms, so it gets an eighth of the rounds."""

Rounds = dict[str, list[tuple[float, float]]]
"""CPU and wall time of each round in ns per token, by form."""


def in_turn(forms: dict[str, Callable[[], object]], rounds: int, tokens: int) -> Rounds:
    times: Rounds = {name: [] for name in forms}
    for number in range(rounds + 1):  # the first round is a warm-up
        for name, run in forms.items():
            if name == SLOW and number > rounds // 8 + 1:
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            spent = (time.process_time() - cpu, time.perf_counter() - wall)
            times[name].append((spent[0] / tokens * 1e9, spent[1] / tokens * 1e9))
    return times


def ratios(cpu: float, found: Rounds) -> str:
    def median_cpu(name: str) -> float:
        return statistics.median(cpu for cpu, _ in found[name])

    text = f"  {cpu / median_cpu('copy'):5.1f} x copy"
    return text + (f"  {cpu / median_cpu('numba'):5.2f} x numba" if "numba" in found else "")


def seconds(calls: list[Callable[[], object]], rounds: int) -> Spread:
    """Return the seconds of one call on the GPU, from a graph of all calls, without host time."""
    for call in calls:
        call()  # the first call allocates memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # Each output keeps its memory.
    found = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(kept))
    return Spread.of(found[1:])


def copy_bandwidth(rounds: int) -> float:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds([lambda: target.copy_(source)], rounds).median


def baseline() -> Callable[..., None]:
    """Return a kernel with one thread per sequence, compiled by nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "one_thread.cu", Path(folder) / "one_thread.so"
        source.write_text(ONE_THREAD_PER_SEQUENCE)
        nvcc = libraries.find_toolchain().nvcc or "nvcc"
        home = Path(shutil.which(nvcc) or nvcc).resolve().parents[1]
        flags = ["-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "-o", str(library)]
        flags += [f"-L{home}/{name}" for name in ("lib64", "lib")]
        subprocess.run([nvcc, *flags, str(source)], check=True)
        function = ctypes.CDLL(str(library)).run

    def run(packed: tuple[Tensor, ...], advantages: Tensor, returns: Tensor) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*packed, advantages, returns)]
        function(
            *pointers[:4],
            ctypes.c_float(GAMMA),
            ctypes.c_float(LAM),
            *pointers[4:],
            len(packed[3]),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    return run


def measure_gpu(rounds: int) -> None:
    bandwidth = copy_bandwidth(rounds)
    print(f"GPU: {torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s")
    one_thread = baseline()
    for sequences, length in GAE_SHAPES:
        measure_gae(sequences, length, bandwidth, one_thread, rounds)
    for size in INTERVAL_BYTES:
        measure_intervals(size, bandwidth, rounds)
    for shape in PAGED_SHAPES:
        measure_pages(*shape, bandwidth, rounds)


def measure_gae(
    sequences: int, length: int, bandwidth: float, one_thread: Callable[..., None], rounds: int
) -> None:
    """Measure GAE on several batches in turn, because together they exceed the GPU's caches."""
    batches = [batch(torch.full((sequences,), length), "cuda") for _ in range(BATCHES)]
    outputs = [(torch.empty_like(one[0]), torch.empty_like(one[0])) for one in batches]
    ours = seconds([partial(packed_gae, *one, GAMMA, LAM) for one in batches], rounds)
    pairs = zip(batches, outputs, strict=True)
    theirs = seconds([partial(one_thread, one, *both) for one, both in pairs], rounds)
    share = of_copy(BYTES_PER_TOKEN * sequences * length, ours, bandwidth)
    faster = theirs.median / ours.median
    print(f"GAE {sequences} x {length}: {share} of copy, {faster:.1f} x one thread")


def of_copy(moved_bytes: int, took_s: Spread, bandwidth: float) -> str:
    """Return the used bandwidth as a share of the bandwidth of a copy."""
    order = (took_s.median, took_s.most, took_s.least)
    return Spread(*(moved_bytes / seconds / bandwidth for seconds in order)).text()


def measure_intervals(size: int, bandwidth: float, rounds: int) -> None:
    """Measure copies of half of a buffer, in intervals of ``size`` bytes with gaps of the same
    size.
    """
    elements = COPIED_BYTES // 4
    step = size // 4
    starts = torch.arange(0, elements - step, 2 * step)
    intervals = Intervals.of(torch.stack([starts, starts + step], 1), "cuda")
    flat = torch.empty(elements, device="cuda")
    packed = gather(flat, intervals)
    moved = 2 * packed.numel() * 4
    for name, call in (
        ("gather", lambda: gather(flat, intervals)),
        ("scatter", lambda: scatter(flat, intervals, packed)),
    ):
        took = seconds([call], rounds)
        print(f"{name:7} {size:8} B: {of_copy(moved, took, bandwidth)} of copy")


def measure_pages(count: int, cells: int, bandwidth: float, rounds: int) -> None:
    """Measure attention over several KV caches in turn, which together exceed the caches of the
    GPU.
    """
    pages = count * cells // PAGE
    lengths = torch.full((count,), cells, device="cuda")
    options: dict[str, Any] = {"page": PAGE, "longest": cells, "scale": 0.1, "window": None}
    calls: list[Callable[[], object]] = []
    for _ in range(BATCHES):
        cache = torch.randn((2, pages * PAGE, KV_HEADS, HEAD_SIZE), device="cuda").bfloat16()
        q = torch.randn((count, HEADS, HEAD_SIZE), device="cuda").bfloat16()
        tables = torch.randperm(pages, device="cuda").view(count, -1)
        rows = torch.arange(count, device="cuda")
        calls.append(partial(paged_attention, q, *cache, tables, rows, lengths, **options))
    took = seconds(calls, rounds)
    moved = cache.numel() * cache.element_size()
    print(f"pages {count} x {cells}: {of_copy(moved, took, bandwidth)} of copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this (default: both)")
    options = parser.parse_args()
    if options.device != "cuda":
        measure_cpu(options.rounds)
    if options.device != "cpu" and torch.cuda.is_available():
        measure_gpu(options.rounds)
    elif options.device == "cuda":
        sys.exit("ops: torch sees no GPU")


if __name__ == "__main__":
    main()
