#!/usr/bin/env python3
"""Measure moves between layouts: planning for large models, and execution on gloo ranks.

scripts/bench/transfer.py [--rounds 3] [--ranks 128 1024] [--execute 9]

A dense decoder of about 70B parameters (80 layers, bfloat16) moves from ``megatron:d4t8p4`` to
``d16t8`` on 128 ranks, and from d32t8p4 to d128t8 on 1,024 ranks, with 8 ranks on each host. The
script prints the seconds that the two layouts and the plan take. It also prints the costs of the
plan: bytes received divided by bytes missing, bytes sent by the busiest rank and on average, bytes
between hosts, segments, slots and staging.

With ``--execute N``, four gloo ranks then execute moves of a model of 0.3 billion parameters N
times. They take turns with an all-to-all of the same bytes, and with megatron-core's own move. The
script prints wall seconds and CPU seconds of all ranks, and the speedup of the move. All times are
the median, minimum and maximum of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from spread import Spread

from slurmrl.engines.megatron.parts import parts_of, place_of
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.tensors.parallel.topology import ProcessTopology
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, plan_move
from tests.distributed.transfer.move_cases import Side
from tests.pool import RankPool

LARGE = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMALL = {
    **LARGE,
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
BUDGET = 256 << 20
HOST = 8


def specs(model: ModelConfig) -> dict[str, TensorSpec]:
    shapes = parameter_shapes(model, "lm")
    return {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}


def megatron(model: ModelConfig, d: int, t: int, p: int) -> PlacedLayout:
    topology = ProcessTopology(("pp", "dp", "tp"), (p, d, t))
    made = {}
    shards = []
    for rank in range(topology.world_size):
        place = place_of(topology, None, 1, rank)
        if place not in made:
            parts = parts_of(model, "lm", place, model.vocab_size, grouped=False)
            made[place] = tuple(shard for own in parts.values() for shard in own)
        shards.append(made[place])
    return PlacedLayout(Layout.of(specs(model), shards), tuple(range(d * t * p)))


def native(model: ModelConfig, d: int, t: int) -> PlacedLayout:
    split, tensors = TensorSplit(model, t), specs(model)
    own = [
        tuple(
            Shard.contiguous(name, split.box(name, spec.shape, rank))
            for name, spec in tensors.items()
        )
        for rank in range(t)
    ]
    return PlacedLayout(Layout.of(tensors, own * d), tuple(range(d * t)))


def lacking(source: PlacedLayout, target: PlacedLayout) -> int:
    """Return the bytes that all ranks together need and do not have, counted box by box."""
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
    model = ModelConfig.from_hf(LARGE)
    print(f"{ranks} ranks, {len(specs(model))} tensors")
    layouts, plans = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        source, target = megatron(model, ranks // 32, 8, 4), native(model, ranks // 8, 8)
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


def execute(rounds: int) -> None:
    jobs = "scripts.bench.transfer_ranks"
    model = ModelConfig.from_hf(SMALL)
    mega, whole = partial(megatron, model), partial(native, model)
    raw = {
        "megatron t2p2 -> native d4": (mega(1, 2, 2), whole(4, 1)),
        "megatron t2p2 -> native d2t2": (mega(1, 2, 2), whole(2, 2)),
        "megatron t4 -> native d2t2": (mega(1, 4, 1), whole(2, 2)),
        "native d2t2 -> native t4": (whole(2, 2), whole(1, 4)),
    }
    swaps = {
        "megatron t2p2 -> megatron d4": (side(pp=2, tp=2), side(dp=4)),
        "megatron t4 -> megatron d2t2": (side(tp=4), side(dp=2, tp=2)),
        "megatron d2t2 -> megatron t4": (side(dp=2, tp=2), side(tp=4)),
        "megatron d2p2 -> megatron t4": (side(pp=2, dp=2), side(tp=4)),
    }
    with RankPool() as pool:
        print("against an all-to-all of the same bytes")
        for name, pair in raw.items():
            compare(name, pool(4, f"{jobs}:against_all_to_all", *pair, rounds, BUDGET)[0])
        print("against megatron-core's swap_model_weights")
        for name, sides in swaps.items():
            compare(name, pool(4, f"{jobs}:against_megatron", [*sides], SMALL, rounds, BUDGET)[0])


def side(**sizes: int) -> Side:
    axes = {axis: sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    return Side(axes, "megatron", dtype="bfloat16")


def compare(name: str, costs: Any) -> None:
    """Print a row; ``costs`` is a `transfer_ranks.Costs`."""
    sent = sum(costs.plan.links().values())
    rounds = list(zip(costs.move, costs.other, strict=True))
    faster = Spread.of(other.wall / move.wall for move, other in rounds)
    cheaper = Spread.of(other.cpu / move.cpu for move, other in rounds)
    own, theirs = (Spread.of(cost.wall for cost in side) for side in (costs.move, costs.other))
    print(
        f"  {name:29s} {sent / 1e6:5.0f} MB sent, {own.text()} s against {theirs.text()}: "
        f"{faster.text()} times as fast, CPU {cheaper.text()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--execute", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    for ranks in options.ranks:
        measure(ranks, options.rounds)
    if options.execute:
        execute(options.execute)


if __name__ == "__main__":
    main()
