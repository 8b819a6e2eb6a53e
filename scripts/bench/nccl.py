#!/usr/bin/env python3
"""Check and time NCCL's collectives: one rank, one rank per GPU, and two ranks on one GPU.

scripts/bench/nccl.py [--megabytes 256] [--timeout 20]

Values are checked, then one operation is timed: bytes of the result over the median of 10 calls.
NCCL rejects two ranks on one GPU. If there is only one GPU, the script tries two ranks and prints
NCCL's message. This is not a failure: it means that layouts of several ranks need as many GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.tensors.ops import collectives

ROUNDS = 10


def check(rank: int, world: int) -> None:
    """Compare the results of all collectives with the expected values."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((world * 8,), rank + 1, dtype=dtype, device="cuda")
        ranks = torch.arange(1, world + 1, device="cuda").repeat_interleave(8).to(dtype)
        total = world * (world + 1) // 2
        whole, part, gathered = mine.clone(), mine[:8].clone(), torch.empty_like(mine)
        dist.all_reduce(whole)
        expect(whole, torch.full_like(whole, total), "all_reduce")
        collectives.reduce_scatter(part, mine)
        expect(part, torch.full_like(part, total), "reduce_scatter")
        collectives.all_gather(gathered, mine[:8].clone())
        expect(gathered, ranks, "all_gather")
        dist.all_to_all_single(gathered, mine)
        expect(gathered, ranks, "all_to_all")
        dist.broadcast(mine, 0)
        expect(mine, torch.ones_like(mine), "broadcast")
    dist.barrier()


def expect(found: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(found, wanted):
        at = int((found != wanted).nonzero()[0])
        sys.exit(f"{what} of {found.dtype}: {found[at]} at {at} instead of {wanted[at]}")


def gigabytes_per_s(buffer: Tensor) -> float:
    """Return the seconds of all_reduce."""
    times = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.all_reduce(buffer)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return buffer.nbytes / statistics.median(times[2:]) / 1e9


def run_rank(rank: int, world: int, store: str, megabytes: int) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    check(rank, world)
    buffer = torch.zeros(megabytes * 2**18, device="cuda")
    rate = gigabytes_per_s(buffer)
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"NCCL {version}: values right; all_reduce of {megabytes} MiB {rate:.1f} GB/s")
    dist.destroy_process_group()


def launch(world: int, options: argparse.Namespace) -> tuple[bool, str]:
    """Run ``world`` ranks. Return if all succeeded, and their output."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, __file__, "--megabytes", str(options.megabytes)]
        command += ["--store", f"{folder}/store", "--world", str(world)]
        children = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"NCCL_DEBUG": "WARN", **os.environ},
            )
            for rank in range(world)
        ]
        deadline = time.monotonic() + options.timeout
        late = ""
        try:
            for child in children:
                child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = f"no end within {options.timeout:.0f} s\n"
        finally:
            for child in children:
                child.kill()
                child.wait()
        output.seek(0)
        return all(child.returncode == 0 for child in children), output.read() + late


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for each number")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.world, options.store, options.megabytes)
        return 0
    gpus = torch.cuda.device_count()
    if gpus == 0:
        sys.exit("nccl: torch sees no GPU")
    failed = False
    for world in sorted({1, gpus}):
        succeeded, printed = launch(world, options)
        failed |= not succeeded
        print(f"{world} ranks, a GPU each: {'passed' if succeeded else 'FAILED'}\n{printed}")
    succeeded, printed = launch(2, options) if gpus == 1 else (False, "not tried: several GPUs\n")
    print(f"2 ranks on one GPU: {'passed' if succeeded else 'refused, as expected'}\n{printed}")
    print("FAILED" if failed else f"1 to {gpus} ranks with a GPU each: passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
