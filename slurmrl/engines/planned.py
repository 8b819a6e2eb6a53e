"""The layouts of a plan's models, computed without building a model, and the costs of their moves.

Costs are bytes by link and rank, their lower bound, memory and messages. Tensor ranks split a dim
that depends on the parameter. Data- and context-parallel ranks split each of these parts into
ceil-chunks of dim 0, as FSDP2 does, or have copies of it. The module is torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

from slurmrl.config.schema.roles import Model, ParallelSizes
from slurmrl.engines.megatron.parts import layout_of, padded, place_of
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.parallel.boxes import SharedParameters, TensorSplit
from slurmrl.models.shapes import constant_specs, parameter_shapes
from slurmrl.plan.estimates.shape import config_values
from slurmrl.plan.model import CallPlan, ModelPlan, Plan, Reallocation
from slurmrl.plan.placement import model_of
from slurmrl.plan.settings import Settings
from slurmrl.tensors.layout import (
    ITEM_BYTES,
    Box,
    HeldBox,
    Holders,
    Index,
    Layout,
    TensorSpec,
    chunk,
)
from slurmrl.tensors.parallel.topology import (
    JOINT,
    Folded,
    ProcessTopology,
    expert_topology,
    topology_of,
)
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, plan_move, regions, wire_dtype


@dataclass(frozen=True)
class Placing:
    """The shapes of a model's whole parameters and their placement.

    ``tensor`` is None for one tensor rank.
    """

    shapes: Mapping[str, Index]
    dtype: str
    topology: ProcessTopology
    rank: int
    """This rank, whose boxes `own_boxes` returns."""
    tensor: SharedParameters | None
    constants: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Tensors of the model that are not parameters; whole on every rank."""
    still: frozenset[str] = frozenset()
    """Frozen parameters of a trained model, for which the optimizer has no state."""
    sharded: bool = True
    """Whether data- and context-parallel ranks have chunks; otherwise each has the whole part."""

    @cached_property
    def _chunks(self) -> dict[int, tuple[int, int]]:
        """Mapping from rank to (number of chunks of its part, index of its chunk)."""
        if not self.sharded:
            return dict.fromkeys(range(self.topology.world_size), (1, 0))
        return {
            rank: (len(members), index)
            for members in self.topology.blocks(JOINT["shard"])
            for index, rank in enumerate(members)
        }

    @cached_property
    def _tensor_ranks(self) -> list[int]:
        topology = self.topology
        return [topology.coordinates(rank).get("tp", 0) for rank in range(topology.world_size)]

    def _part(self, name: str, tensor_rank: int) -> Box:
        shape = self.shapes[name]
        return (
            Box.whole(shape) if self.tensor is None else self.tensor.box(name, shape, tensor_rank)
        )

    def _chunk(self, whole: Box, rank: int) -> Box:
        """Return the part of a tensor rank's box that a rank stores; it may be empty."""
        part = chunk(whole.size, *self._chunks[rank])
        return Box((whole.start[0] + part.start[0], *whole.start[1:]), part.size)

    def own_boxes(self) -> dict[str, Box]:
        """Return a mapping from each parameter to the box that this rank stores."""
        rank = self.rank
        tensor_rank = self._tensor_ranks[rank]
        return {name: self._chunk(self._part(name, tensor_rank), rank) for name in self.shapes}

    def copies(self, name: str) -> int:
        """Return the number of tensor ranks that store each element."""
        return 1 if self.tensor is None else self.tensor.copies(name)

    def layout(self, prefixes: Sequence[str] = ("",), *, copies: bool = True) -> Layout:
        """Return the layout of the constants and, under each prefix, of every parameter.

        Frozen parameters have only the empty prefix. Without ``copies``, only the first rank that
        stores an element lists it.
        """
        own = self._holders(copies=copies)
        ranks = tuple(range(self.topology.world_size if copies else 1))
        constants = {
            name: Holders((HeldBox.contiguous(ranks, Box.whole(spec.shape)),))
            for name, spec in self.constants.items()
        }
        names = {
            prefix + name: name
            for prefix in prefixes
            for name in self.shapes
            if not prefix or name not in self.still
        }
        return Layout(
            {
                **{full: TensorSpec(self.shapes[name], self.dtype) for full, name in names.items()},
                **self.constants,
            },
            {**{full: own[name] for full, name in names.items()}, **constants},
            self.topology.world_size,
        )

    def _holders(self, *, copies: bool) -> dict[str, Holders]:
        """Return the holders of each parameter; equal holders are one object."""
        tensor_ranks = range(1 if self.tensor is None else self.tensor.ranks)
        made: dict[tuple[tuple[Box, ...], int], Holders] = {}
        found = {}
        for name in self.shapes:
            wholes = tuple(self._part(name, tensor_rank) for tensor_rank in tensor_ranks)
            every = 1 if copies else self.copies(name)
            if (wholes, every) not in made:
                made[wholes, every] = self._spread(wholes, every)
            found[name] = made[wholes, every]
        return found

    def _spread(self, wholes: Sequence[Box], every: int) -> Holders:
        """Return the chunks of every ``every``-th tensor rank; ranks between have equal boxes."""
        ranks: dict[Box, list[int]] = {}
        for rank, tensor_rank in enumerate(self._tensor_ranks):
            box = self._chunk(wholes[tensor_rank], rank)
            if tensor_rank % every == 0 and box.count:
                ranks.setdefault(box, []).append(rank)
        return Holders(tuple(HeldBox.contiguous(tuple(by), box) for box, by in ranks.items()))


class PlannedModel(Folded, Protocol):
    """The part of a model's plan on which its layout depends."""

    @property
    def trained(self) -> bool: ...
    @property
    def head(self) -> Head: ...


def moves(settings: Settings, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the costs of each reallocation of a plan, as JSON values.

    Raises UsageError for a model of transformers, whose layout is not known before it is built.
    """
    budget = settings.config.transfer.staging_mib << 20
    calls: dict[Reallocation, list[CallPlan]] = defaultdict(list)
    for call in plan.all_calls:
        for hook in (*call.pre_hooks, *call.post_hooks):
            if isinstance(hook, Reallocation):
                calls[hook].append(call)
    for hook, users in calls.items():
        sides = plan.models[hook.source], plan.models[hook.target]
        source, target = (_placed(settings, side) for side in sides)
        per_host = plan.group(sides[0].group).workers_per_host
        hosts = {rank: rank // per_host for side in sides for rank in side.ranks}
        move = plan_move(source, target, hosts=hosts, budget=budget)
        yield {
            "source": hook.source,
            "target": hook.target,
            "when": "after" if hook in users[0].post_hooks else "before",
            "calls": list(dict.fromkeys(call.name for call in users)),
            **costs(move, source, target, hosts).to_json(),
        }


def _placed(settings: Settings, model: ModelPlan) -> PlacedLayout:
    section = model_of(settings.config, model.role)
    if section.implementation == "hf":
        raise UsageError(
            f"moves of the weights of {model.role} are known only once the model is built, "
            "because it is a model of transformers (implementation: hf)"
        )
    config = ModelConfig.from_hf(config_values(section))
    return PlacedLayout(planned_layout(model, section, config), model.ranks)


def planned_layout(plan: PlannedModel, model: Model, config: ModelConfig) -> Layout:
    """Return the layout that the engine of a planned model will have.

    ``model`` is the section of the model in the configuration.
    """
    return LAYOUTS[plan.engine](plan, model, config)


def _fsdp(plan: PlannedModel, model: Model, config: ModelConfig) -> Layout:
    wide = model.lora is None if plan.trained else model.ema is not None
    dtype = "float32" if wide else model.dtype
    return _placing(plan, config, dtype, sharded=True).layout()


def _native(plan: PlannedModel, model: Model, config: ModelConfig) -> Layout:
    return _placing(plan, config, model.dtype, sharded=False).layout()


def _placing(plan: PlannedModel, config: ModelConfig, dtype: str, *, sharded: bool) -> Placing:
    ranks = plan.sizes.get("tp", 1)
    split = TensorSplit(config, ranks) if ranks > 1 else None
    shapes = parameter_shapes(config, plan.head)
    constants = constant_specs(config)
    return Placing(shapes, dtype, topology_of(plan), 0, split, constants, sharded=sharded)


def _megatron(plan: PlannedModel, model: Model, config: ModelConfig) -> Layout:
    """Return the layout of a model on the megatron engine.

    TransformerEngine changes the names of the experts' storages, but no box.
    """
    topology, experts = topology_of(plan), expert_topology(plan)
    places = [
        place_of(topology, experts, plan.virtual_pipeline, rank)
        for rank in range(topology.world_size)
    ]
    multiple = (model.model or ParallelSizes()).make_vocab_size_divisible_by
    rows = padded(config.vocab_size, plan.sizes.get("tp", 1) * multiple)
    return layout_of(config, plan.head, model.dtype, places, rows, grouped=False)


LAYOUTS: dict[str, Callable[[PlannedModel, Model, ModelConfig], Layout]] = {
    "fsdp": _fsdp,
    "native": _native,
    "sglang": _native,
    "vllm": _native,
    "megatron": _megatron,
}
"""Mapping from the name of each backend to the function that computes its layouts."""


@dataclass(frozen=True)
class RankCosts:
    """The costs of one rank."""

    rank: int
    host: int
    sent_bytes: int
    received_bytes: int
    lacking_bytes: int
    """Bytes that the rank needs and does not have: the lower bound of ``received_bytes``."""
    copied_bytes: int
    """Bytes that the rank copies from its source to its target tensors."""
    staging_bytes: int
    """Maximum memory of the rank in addition to both models."""


@dataclass(frozen=True)
class LinkCosts:
    """The bytes from one rank to another."""

    sender: int
    receiver: int
    across_hosts: bool
    bytes: int


@dataclass(frozen=True)
class MoveCosts:
    ranks: tuple[RankCosts, ...]
    links: tuple[LinkCosts, ...]
    messages: int
    segments: int
    slots: int
    staging_limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        across = sum(link.bytes for link in self.links if link.across_hosts)
        received = sum(rank.received_bytes for rank in self.ranks)
        lacking = sum(rank.lacking_bytes for rank in self.ranks)
        return {
            "bytes": {
                "same_rank": sum(rank.copied_bytes for rank in self.ranks),
                "same_host": received - across,
                "across_hosts": across,
            },
            "received_bytes": received,
            "lower_bound_bytes": lacking,
            "over_lower_bound": received / lacking if lacking else 1.0,
            "peak_extra_bytes": max((rank.staging_bytes for rank in self.ranks), default=0),
            **asdict(self),
        }


def costs(
    plan: MovePlan, source: PlacedLayout, target: PlacedLayout, hosts: Mapping[int, int]
) -> MoveCosts:
    """Return the costs of the plan of a move from ``source`` to ``target``.

    ``hosts`` gives the host of each global rank.
    """
    links, staging = plan.links(), plan.staging()
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for (sender, receiver), count in links.items():
        sent[sender] += count
        received[receiver] += count
    lacking = _lacking(source, target)
    ranks = tuple(
        RankCosts(
            rank,
            hosts[rank],
            sent[rank],
            received[rank],
            lacking[rank],
            sum(cargo.bytes for cargo in plan.local.get(rank, ())),
            staging.get(rank, 0),
        )
        for rank in sorted({*source.ranks, *target.ranks})
    )
    return MoveCosts(
        ranks,
        tuple(
            LinkCosts(sender, receiver, hosts[sender] != hosts[receiver], count)
            for (sender, receiver), count in sorted(links.items())
        ),
        sum(sum(1 for _ in s.messages()) * len(list(pairwise(s.chain))) for s in plan.segments),
        len(plan.segments),
        plan.slots,
        plan.budget,
    )


def _lacking(source: PlacedLayout, target: PlacedLayout) -> dict[int, int]:
    """Return the bytes that each rank needs and does not have, computed from the layouts."""
    found: dict[int, int] = defaultdict(int)
    for region in regions(source, target):
        specs = (side.layout.tensors[region.name] for side in (source, target))
        count = region.box.count * ITEM_BYTES[wire_dtype(region.name, *specs)]
        for rank in set(region.takers).difference(region.holders):
            found[rank] += count
    return found
