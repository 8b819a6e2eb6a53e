#!/usr/bin/env python3
"""Compare the plan's predicted seconds with small models on two gloo ranks.

scripts/bench/predicted_layouts.py PROFILE [--rounds N] [--held-out]

PROFILE is a hardware profile of this machine, as `slurmrl profile-cluster --scheduler local` writes
it. For each model, layout and call it prints the minimum CPU seconds of a rank and the predicted
seconds. gloo on one host copies with the processors, so CPU seconds include most of its work.

CPU seconds omit waits, which are long on a machine with other programs; wall seconds include them.
With --held-out, it measures models and lengths that were not used to correct a formula. For each
model, length and call, it then prints by how much the layout on two ranks with the minimum
predicted seconds is slower than the fastest measured layout.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from predictions import ordered_pairs

from slurmrl.config.allocation import parse
from slurmrl.plan.estimates.hardware import Machine, made, read_file
from slurmrl.plan.estimates.pass_seconds import PassJob, Seconds, inference, training
from slurmrl.plan.estimates.shape import read
from tests.pool import RankPool

LAYOUTS = {
    "fsdp:d1": {"dp": 1},
    "fsdp:d2": {"dp": 2},
    "fsdp:t2": {"tp": 2},
    "fsdp:c2": {"cp": 2},
}
MODELS = ((64, 4), (128, 4), (256, 4))
"""Hidden sizes and layers."""
LENGTHS = (32, 128)
HELD_OUT_MODELS = ((96, 6), (192, 3), (384, 2))
HELD_OUT_LENGTHS = (64, 192)
SEQUENCES = 16


class Row(NamedTuple):
    """A call's measured and predicted seconds."""

    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def architecture(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }


def predicted(machine: Machine, values: dict[str, Any], layout: str, length: int) -> list[Seconds]:
    allocation, shape = parse(layout), read(values)
    assert shape is not None
    tokens = SEQUENCES * length / allocation.sizes["dp"]
    job = PassJob(
        shape=shape,
        allocation=allocation,
        head="lm",
        tokens=tokens,
        length=length,
        microbatch=16384,
        width=4,
        sharded=True,
        small=True,
    )
    return [training(job, machine), inference(job, machine)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("profile", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--held-out", action="store_true", help="other models and lengths")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    hardware = made(read_file(given.profile), str(given.profile))
    machine = Machine(hardware.gpu, 2, hardware.efficiency)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs; {hardware.source}")
    print("call  model layout   length    CPU ms predicted  ratio   wall ms")
    rows: dict[str, list[Row]] = {}
    same: dict[tuple[int, int, str], dict[str, Row]] = {}
    models, lengths = (MODELS, LENGTHS)
    if given.held_out:
        models, lengths = (HELD_OUT_MODELS, HELD_OUT_LENGTHS)
    with RankPool() as pool:
        for hidden, layers in models:
            values = architecture(hidden, layers)
            model = {"architecture": values, "optimizer": {"lr": 1e-4}, "dtype": "float32"}
            for layout, sizes in LAYOUTS.items():
                for length in lengths:
                    world = parse(layout).world_size
                    reference = "scripts.bench.predicted_ranks:measure"
                    arguments = (model, sizes, SEQUENCES, length, given.rounds)
                    found = pool(world, reference, *arguments, deadline_s=600)[0]
                    parts = predicted(machine, values, layout, length)
                    for (call, (cpu, wall)), causes in zip(found.items(), parts, strict=True):
                        row = Row(cpu, sum(causes.values()))
                        rows.setdefault(layout, []).append(row)
                        if world == 2:
                            same.setdefault((hidden, length, call), {})[layout] = row
                        print(
                            f"{call:5} {hidden:3}x{layers} {layout:8} {length:6} {cpu * 1e3:9.2f} "
                            f"{row.predicted * 1e3:9.2f} {row.predicted / cpu:6.2f} "
                            f"{wall * 1e3:9.2f}",
                            flush=True,
                        )
    for layout, found in (*rows.items(), ("all", [row for each in rows.values() for row in each])):
        errors = [row.error for row in found]
        print(
            f"{layout}: median error {median(errors):.1%} of {len(found)} calls, "
            f"largest {max(errors):.0%}"
        )
    right, count = ordered_pairs([row for each in rows.values() for row in each])
    print(f"order of pairs that differ by more than 20 %: {right} of {count} right")
    slower = [
        min(found.values(), key=lambda one: one.predicted).measured
        / min(one.measured for one in found.values())
        - 1
        for found in same.values()
    ]
    print(
        f"best predicted of {len(LAYOUTS) - 1} layouts on 2 ranks against the best measured: "
        f"within 5 % in {sum(one <= 0.05 for one in slower)} of {len(slower)} cases, "
        f"median {median(slower):.1%}, largest {max(slower):.1%} slower"
    )


if __name__ == "__main__":
    main()
