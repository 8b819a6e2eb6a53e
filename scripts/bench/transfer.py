#!/usr/bin/env python3
"""Planning of moves between the layouts of large models.

scripts/bench/transfer.py [--rounds 3]

A 70B-like dense decoder (80 layers, bfloat16) moves from ``megatron:d4t8p4`` to tensor ranks with
whole layers, d16t8, on the same 128 ranks, and from d32t8p4 to d128t8 on 1,024, 8 ranks to a host.
Printed are the seconds (median, smallest and largest of the rounds) that the two layouts and the
plan take, and what the plan costs: bytes received over bytes lacking, bytes sent by the busiest
rank and by all on average, bytes between hosts, segments, slots, staging.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slurmrl.engines.megatron.parts import parts_of
from slurmrl.engines.megatron.place import place_of
from slurmrl.layout.box import Box
from slurmrl.layout.layout import Layout, TensorSpec
from slurmrl.layout.shard import Shard
from slurmrl.models.config import ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.parallel.topology import ProcessTopology
from slurmrl.transfer.plan import MovePlan, plan_move
from slurmrl.transfer.regions import PlacedLayout

MODEL = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
BUDGET = 256 << 20
HOST = 8


def specs() -> dict[str, TensorSpec]:
    shapes = parameter_shapes(MODEL, "lm")
    return {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}


def megatron(d: int, t: int, p: int) -> PlacedLayout:
    topology = ProcessTopology(("pp", "dp", "tp"), (p, d, t))
    made = {}
    shards = []
    for rank in range(topology.world_size):
        place = place_of(topology, None, 1, rank)
        if place not in made:
            parts = parts_of(MODEL, "lm", place, MODEL.vocab_size, grouped=False)
            made[place] = tuple(shard for own in parts.values() for shard in own)
        shards.append(made[place])
    return PlacedLayout(Layout.of(specs(), shards), tuple(range(d * t * p)))


def native(d: int, t: int) -> PlacedLayout:
    split, tensors = TensorSplit(MODEL, t), specs()
    own = [
        tuple(
            Shard.contiguous(name, split.box(name, spec.shape, rank))
            for name, spec in tensors.items()
        )
        for rank in range(t)
    ]
    return PlacedLayout(Layout.of(tensors, own * d), tuple(range(d * t)))


def lacking(source: PlacedLayout, target: PlacedLayout) -> int:
    """The bytes that all ranks together need and do not hold, counted box by box."""
    total = 0
    tensors = target.layout.tensors
    held: dict[tuple[int, str], list[Box]] = {}
    for rank, shard in source.layout.all_shards():
        held.setdefault((source.ranks[rank], shard.name), []).append(shard.box)
    for rank, shard in target.layout.all_shards():
        own = held.get((target.ranks[rank], shard.name), [])
        common = (shard.box.intersect(box) for box in own)
        kept = sum(box.count for box in common if box is not None)
        item = tensors[shard.name].bytes // Box.whole(tensors[shard.name].shape).count
        total += (shard.box.count - kept) * item
    return total


def show(what: str, seconds: list[float]) -> None:
    middle = statistics.median(seconds)
    print(f"  {what:10s} {middle:7.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")


def measure(ranks: int, rounds: int) -> None:
    print(f"{ranks} ranks, {len(specs())} tensors")
    layouts, plans = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        source, target = megatron(ranks // 32, 8, 4), native(ranks // 8, 8)
        layouts.append(time.perf_counter() - began)
        began = time.perf_counter()
        hosts = {rank: rank // HOST for rank in range(ranks)}
        plan: MovePlan = plan_move(source, target, hosts=hosts, budget=BUDGET)
        plans.append(time.perf_counter() - began)
    show("layouts", layouts)
    show("plan", plans)
    links = plan.links()
    sent = [0] * ranks
    for (sender, _), count in links.items():
        sent[sender] += count
    across = sum(count for (a, b), count in links.items() if hosts[a] != hosts[b])
    ratio = sum(links.values()) / lacking(source, target)
    longest = max(len(segment.chain) - 1 for segment in plan.segments)
    print(
        f"  received   {ratio:7.4f} x what is lacking\n"
        f"  sent       {max(sent) / 2**30:7.2f} GiB at most by a rank, "
        f"{sum(sent) / ranks / 2**30:.2f} on average; {across / 2**30:.1f} between hosts\n"
        f"  in {len(plan.segments)} segments over up to {longest} links and {plan.slots} slots; "
        f"{max(plan.staging().values()) / 2**20:.0f} MiB staged at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    options = parser.parse_args()
    for ranks in options.ranks:
        measure(ranks, options.rounds)


if __name__ == "__main__":
    main()
