#!/usr/bin/env python3
"""Measure how long training waits for asynchronous and for synchronous checkpoints in one run.

scripts/bench/checkpoint.py [--directory DIR ...] [--rounds 5] [--steps 4] [--hidden 512]
    [--layers 8] [--gpu]

One rank trains a decoder on a CPU, or with --gpu on a GPU in bfloat16, with the worker's own engine
and saver. A round has a few steps without a checkpoint, with a synchronous checkpoint, and with an
asynchronous checkpoint. The modes take turns, so that the load of the machine affects all of them.
The stall is the time in which the rank cannot train because it copies, or copies and writes.
"whole" is the total cost of a checkpoint: the additional time of the steps, including CPU time that
the writer takes from the training threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.config.schema.roles import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.engines.base import Engine, Outputs
from slurmrl.plan.model import ModelPlan
from slurmrl.tensors.parallel.device import CPU, GPU, Accelerator, set_up
from slurmrl.tensors.parallel.groups import build
from slurmrl.workers.worker.saver import Saver

MODES = ("none", "synchronous", "asynchronous")
SEQUENCES, TOKENS = 4, 128
VOCABULARY = 8192


def make_engine(hidden: int, layers: int, accelerator: Accelerator) -> Engine:
    architecture = {
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    placed: Any = argparse.Namespace(role="actor", ranks=(0,), sizes={"dp": 1})
    plan: ModelPlan = placed
    context = build([plan], rank=0, device=accelerator.device)["actor"]
    dtype = "bfloat16" if accelerator.device.type == "cuda" else "float32"
    engine: Engine = ENGINES.load("fsdp")(
        "actor",
        Model(architecture=architecture, dtype=dtype),
        head="lm",
        trained=True,
        context=context,
        seed=1,
        total_steps=1000,
        source=None,
    )
    return engine


def loss(outputs: Outputs, sample: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    return -outputs["logp"].sum(), {}


def batch() -> SequenceSample:
    tokens = torch.randint(VOCABULARY, (SEQUENCES * TOKENS,))
    ids = [str(number) for number in range(SEQUENCES)]
    return SequenceSample.from_default([TOKENS] * SEQUENCES, ids, {"input_ids": tokens})


def measure(engine: Engine, mode: str, folder: Path, steps: int) -> tuple[float, float, float]:
    """Return three times in seconds: of all steps, of the rank's wait, and until the checkpoint was
    on disk.
    """
    saver, sample = Saver(0), batch()
    done: list[float] = []
    began = time.monotonic()
    if mode != "none":
        snapshot = engine.snapshot(copy=mode == "asynchronous")
        assert snapshot is not None
        saver.write(
            [snapshot],
            folder,
            0,
            lambda said: done.append(time.monotonic()),
            asynchronous=mode == "asynchronous",
        )
    stall_s = time.monotonic() - began
    for _ in range(steps):
        engine.train_batch(sample, loss, float(SEQUENCES * TOKENS))
    trained = time.monotonic()
    saver.wait()
    return trained - began, stall_s, (done[0] - began) if done else 0.0


def run(engine: Engine, where: Path, rounds: int, steps: int) -> None:
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    size = 0
    for number in range(
        rounds + 1
    ):  # the first checkpoint is a warm-up, in which buffers are allocated
        for mode in MODES:
            folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=where))
            taken = measure(engine, mode, folder, steps)
            size = max(size, sum(file.stat().st_size for file in folder.iterdir()))
            shutil.rmtree(folder)
            if number:
                found[mode].append(taken)
    plain = [total for total, _, _ in found["none"]]
    plain_s = statistics.median(plain)
    print(f"{where}: {size / 1e6:.0f} MB, step {plain_s / steps:.3f} s, {rounds} rounds of {steps}")
    for mode in MODES[1:]:
        stall_s = statistics.median(one[1] for one in found[mode])
        ratios = [
            one[1] / other[1] for one, other in zip(found[mode], found["synchronous"], strict=True)
        ]
        wholes = [one[0] - total for one, total in zip(found[mode], plain, strict=True)]
        whole_s = statistics.median(one[0] for one in found[mode]) - plain_s
        written_s = statistics.median(one[2] for one in found[mode])
        print(
            f"  {mode:13s} stall {stall_s:7.3f} s  ({statistics.median(ratios):5.3f}, "
            f"{min(ratios):5.3f} to {max(ratios):5.3f})  whole {whole_s:7.3f} s "
            f"({min(wholes):.3f} to {max(wholes):.3f})  on disk after {written_s:7.3f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--gpu", action="store_true", help="train on a GPU in bfloat16")
    options = parser.parse_args()
    accelerator = GPU if options.gpu else CPU
    set_up(accelerator, threads=1, deterministic=False)
    torch.manual_seed(1)
    dist.init_process_group(accelerator.backend, store=dist.HashStore(), rank=0, world_size=1)
    engine = make_engine(options.hidden, options.layers, accelerator)
    where = torch.cuda.get_device_name() if options.gpu else "1 training thread"
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {where}", flush=True)
    for directory in options.directory or [Path("/tmp"), Path("/dev/shm")]:
        run(engine, directory, options.rounds, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
