"""The part of `transfer.py` that runs on each gloo rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.engines.base import Engine
from slurmrl.tensors.parallel.device import CPU, set_up
from slurmrl.tensors.transfer.execute import Holdings, Mover
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, plan_move
from tests.distributed.transfer.move_cases import Side, engines, placed_layouts


class Cost(NamedTuple):
    """The cost of one execution: wall seconds of the slowest rank, CPU seconds of all."""

    wall: float
    cpu: float


class Costs(NamedTuple):
    """Costs per round of a move and of the peer."""

    plan: MovePlan
    move: list[Cost]
    other: list[Cost]


def timed(act: Callable[[], object]) -> Cost:
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    act()
    cpu = torch.tensor(time.process_time() - used, dtype=torch.float64)
    wall = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(cpu)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    return Cost(float(wall), float(cpu))


def in_turn(plan: MovePlan, move: Callable[[], object], other: Any, rounds: int) -> Costs:
    """Return the costs of move and peer, which take turns after one warm-up round."""
    timed(other), timed(move)
    costs = [(timed(other), timed(move)) for _ in range(rounds)]
    return Costs(plan, [cost for _, cost in costs], [cost for cost, _ in costs])


def planned(source: PlacedLayout, target: PlacedLayout, budget: int) -> MovePlan:
    set_up(CPU, threads=1, deterministic=True)  # as in workers
    hosts = {rank: rank // 2 for rank in range(dist.get_world_size())}
    return plan_move(source, target, hosts=hosts, budget=budget)


def mover_of(plan: MovePlan, source: Holdings, target: Holdings) -> Mover:
    device = torch.device("cpu")
    return Mover(plan, dist.get_rank(), source, target, group=None, device=device)


def against_all_to_all(
    source: PlacedLayout, target: PlacedLayout, rounds: int, budget: int
) -> Costs:
    """Measure a move, and an all-to-all of the same bytes between each pair of ranks.

    In the all-to-all, a rank sends to itself the bytes that the move copies locally. The buffers
    and the results of the all-to-all are packed.
    """
    plan, rank, ranks = planned(source, target, budget), dist.get_rank(), dist.get_world_size()
    sides = [Holdings(side, rank, _storages(side, rank)) for side in (source, target)]
    links = plan.links()
    links[rank, rank] = sum(cargo.bytes for cargo in plan.local.get(rank, ()))
    out = [links.get((rank, peer), 0) for peer in range(ranks)]
    into = [links.get((peer, rank), 0) for peer in range(ranks)]
    send, received = (torch.ones(sum(sizes), dtype=torch.uint8) for sizes in (out, into))
    mover = mover_of(plan, *sides)
    return in_turn(
        plan, mover.run, lambda: dist.all_to_all_single(received, send, into, out), rounds
    )


def _storages(placed: PlacedLayout, rank: int) -> dict[str, Tensor]:
    """Return tensors for a rank's part of a layout, with all their pages in memory."""
    sizes: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for shard in placed.layout.held_by(placed.ranks.index(rank)):
        last = zip(shard.box.size, shard.strides, strict=True)
        end = shard.offset + 1 + sum((length - 1) * stride for length, stride in last)
        sizes[shard.storage] = max(sizes.get(shard.storage, 0), end)
        dtypes[shard.storage] = getattr(torch, placed.layout.tensors[shard.name].dtype)
    return {name: torch.ones(size, dtype=dtypes[name]) for name, size in sizes.items()}


def against_megatron(
    sides: list[Side], architecture: dict[str, Any], rounds: int, budget: int
) -> Costs:
    """Measure a move between two megatron engines, and megatron-core's ``swap_model_weights``;
    check every bit.
    """
    made = engines(sides, architecture)
    layouts = placed_layouts(sides, made)
    plan, rank = planned(*layouts, budget), dist.get_rank()
    source, target = (engine for engine in made if engine is not None)
    holdings = [
        Holdings(layout, rank, engine.storages())
        for layout, engine in zip(layouts, (source, target), strict=True)
    ]
    mover, swap = mover_of(plan, *holdings), _swap(source, target)
    expected = {name: tensor.clone() for name, tensor in target.storages().items()}
    for act in (mover.run, swap):
        for tensor in target.storages().values():
            tensor.detach().fill_(float("nan"))
        act()
        for name, tensor in target.storages().items():
            assert torch.equal(tensor, expected[name]), name
    return in_turn(plan, mover.run, swap, rounds)


def _swap(source: Engine, target: Engine) -> Callable[[], object]:
    """Run megatron-core's move over the default group, because its own gloo service starts a CUDA
    stream.
    """
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
    from megatron.core.resharding.refit import swap_model_weights

    service = GlooCopyService.__new__(GlooCopyService)
    service.rank, service.world_size = dist.get_rank(), dist.get_world_size()
    service.gloo_pg, service._copy_stream = dist.group.WORLD, None
    service.send_ops, service.recv_ops = [], []
    (ours,), (theirs,) = (vars(engine)["_chunks"] for engine in (source, target))
    for chunk in (ours, theirs):
        for name, parameter in chunk.named_parameters():
            if ".linear_fc1." in name:  # gate and up matrix, as in megatron's own gated models
                parameter.partition_stride = 2
    return lambda: swap_model_weights(ours, theirs, service)
