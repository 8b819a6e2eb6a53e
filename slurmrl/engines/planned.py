"""The layouts of a plan's models, computed without building a model, and the moves between them.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from slurmrl.config.schema.roles import Model, ParallelSizes
from slurmrl.engines.fsdp.placing import Placing
from slurmrl.engines.megatron.parts import layout_of, padded, place_of
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.plan.estimates.shape import config_values
from slurmrl.plan.model import CallPlan, ModelPlan, Plan, Reallocation
from slurmrl.plan.placement import model_of
from slurmrl.plan.settings import Settings
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.topology import Folded, expert_topology, topology_of
from slurmrl.tensors.transfer.costs import costs
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move


class PlannedModel(Folded, Protocol):
    """Part of a model's plan that its layout depends on."""

    @property
    def trained(self) -> bool: ...
    @property
    def head(self) -> Head: ...


def moves(settings: Settings, plan: Plan) -> Iterator[dict[str, Any]]:
    """The costs of every reallocation of a plan, as plain values.

    Raises UsageError if the layout of a model is known only when it is built.
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
            f"the moves of {model.role} are not known before it is built: it is a model of "
            "transformers (implementation: hf)"
        )
    config = ModelConfig.from_hf(config_values(section))
    return PlacedLayout(planned_layout(model, section, config), model.ranks)


def planned_layout(plan: PlannedModel, model: Model, config: ModelConfig) -> Layout:
    """The layout that the engine of a model of the plan will have.

    ``model`` is its section of the configuration.
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
    return Placing(shapes, dtype, topology_of(plan), 0, split, sharded=sharded)


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
"""By the names of all backends."""
