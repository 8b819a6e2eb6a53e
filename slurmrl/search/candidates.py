"""The layouts and settings that one model of a trial can have on a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import AXES, AXIS_OF, BACKENDS
from slurmrl.config.schema import Model, ParallelSizes
from slurmrl.errors import AllocationError
from slurmrl.plan.checks.fit import Fit, check
from slurmrl.plan.checks.model_sources import hf_problems
from slurmrl.plan.dataflow import Call
from slurmrl.plan.engine_rules import ENGINES, HF, can
from slurmrl.plan.estimates.call_costs import (
    Checked,
    MeanTokens,
    cost_in,
    demand_of,
    memory_bytes,
    placed_models,
)
from slurmrl.plan.estimates.hardware import hardware_of
from slurmrl.plan.estimates.memory import Memory, MemoryDemand, estimate
from slurmrl.plan.estimates.shape import lengths_of
from slurmrl.plan.estimates.step_seconds import moves_to_rollouts
from slurmrl.plan.inherited_settings import FIELDS
from slurmrl.plan.placement import LARGEST_HOST, ROLLOUTS, layout_of

MICROBATCHES: Final = (4096, 8192, 16384, 32768, 65536)
"""Values of ``max_tokens_per_microbatch`` to try in addition to the configuration's value."""
VIRTUAL: Final = (1, 2, 4)
"""Numbers of virtual stages of a pipeline to try."""
CHECKPOINTING: Final = ("off", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """Settings of one model, with its predicted seconds in a step and its memory."""

    name: str
    model: Model
    """Section of the model; the actor's section for generation."""
    allocation: Allocation
    seconds: float
    memory: Memory

    @property
    def key(self) -> tuple[float, str]:
        """Sorting key of candidates: seconds, then layout and settings."""
        settings = f"{self.allocation} {self.model.max_tokens_per_microbatch}"
        return self.seconds, f"{settings} {self.model.recompute} {self.model.offload}"


def allocations(engine: str, gpus: int, *, largest_tp: int) -> Iterator[Allocation]:
    """Yield all layouts of an engine on exactly ``gpus`` GPUs."""
    letters = ENGINES[engine].dimensions
    split = [AXIS_OF[letter] for letter in letters if letter not in "de"]
    for sizes in product(*(_divisors(gpus) for _ in split)):
        chosen = dict(zip(split, sizes, strict=True))
        used = math.prod(sizes)
        if gpus % used or chosen.get("tp", 1) > largest_tp:
            continue
        full = {**dict.fromkeys(AXES, 1), **chosen, "dp": gpus // used}
        for ep in _divisors(gpus // full["pp"]) if "e" in letters else (1,):
            try:
                yield Allocation(engine, sizes={**full, "ep": ep})
            except AllocationError:
                continue


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def of_model(
    checked: Checked,
    name: str,
    gpus: int,
    engines: Iterable[str],
    mean: MeanTokens,
    *,
    generates: bool = False,
) -> list[Candidate]:
    """Return the candidates of the plan's model ``name`` that are `unbeaten`.

    For the actor and for generation, return the unbeaten candidates of each layout, because answers
    differ in these layouts. With ``generates``, the model is the actor and its ranks also generate.
    """
    placed = placed_models(checked)[name]
    demand = demand_of(checked, name, placed)
    if demand is None:
        return []
    calls = _calls(checked, name, generates=generates)
    cluster = checked.config.cluster
    limit, hardware = memory_bytes(cluster), hardware_of(cluster)
    host_link = math.inf if hardware is None else hardware.efficiency.host_link
    found = []
    for variant in _variants(checked, name, demand, gpus, engines, generates=generates):
        needed = estimate(variant)
        if limit is not None and needed.together > limit:
            continue
        seconds = _seconds(checked, calls, name, variant, mean)
        if name == ROLLOUTS:
            seconds += moves_to_rollouts(
                checked.config, replace(placed, allocation=variant.allocation)
            )
        if variant.model.offload:
            seconds += 2 * needed.standing / host_link
            needed = replace(needed, weights=0, optimizer=0)
        found.append(Candidate(name, variant.model, variant.allocation, seconds, needed))
    if name not in ("actor", ROLLOUTS):
        return unbeaten(found)
    layouts: dict[str, list[Candidate]] = {}
    for one in found:
        layouts.setdefault(str(one.allocation), []).append(one)
    kept = (one for layout in layouts.values() for one in unbeaten(layout))
    return sorted(kept, key=lambda each: each.key)


def least_memory(checked: Checked, name: str, gpus: int, engines: Iterable[str]) -> int | None:
    """Return the minimum bytes that a model needs on a GPU; None if no layout is possible."""
    demand = demand_of(checked, name, placed_models(checked)[name])
    if demand is None:
        return None
    found = _variants(checked, name, demand, gpus, engines, generates=False)
    return min((estimate(variant).together for variant in found), default=None)


def _calls(checked: Checked, name: str, *, generates: bool) -> list[Call]:
    """Return the calls of a step on a model. With ``generates``, the actor also generates."""
    names = [each for each in placed_models(checked) if not (generates and each == ROLLOUTS)]
    calls = checked.algorithm.calls(checked.config)
    return [call for call in calls if layout_of(call, names) == name]


def _seconds(
    checked: Checked, calls: Sequence[Call], name: str, variant: MemoryDemand, mean: MeanTokens
) -> float:
    total = 0.0
    for call in calls:
        found = cost_in(checked, call, name, variant.model, variant.allocation, mean)
        if found is not None and found.seconds is not None:
            total += found.seconds
    return total


def _variants(
    checked: Checked,
    name: str,
    demand: MemoryDemand,
    gpus: int,
    engines: Iterable[str],
    *,
    generates: bool,
) -> Iterator[MemoryDemand]:
    """Yield ``demand`` with all layouts and settings that fit the architecture and the batch."""
    config, algorithm = checked.config, checked.algorithm
    lengths = lengths_of(config, algorithm, demand.shape)
    steps = algorithm.minibatches if demand.trained else 0
    largest = config.cluster.workers_per_host or LARGEST_HOST
    for engine in engines:
        for allocation in allocations(engine, gpus, largest_tp=largest):
            if algorithm.batch_size % allocation.sizes["dp"] or not _allowed(
                demand.model, allocation, generates=generates
            ):
                continue
            for model in _models(demand, allocation, name):
                fit = Fit(model, allocation, demand.shape, lengths, steps)
                if next(check(fit), None) is None:
                    yield replace(
                        demand,
                        model=model,
                        allocation=allocation,
                        generates=demand.generates or generates,
                    )


def _allowed(model: Model, allocation: Allocation, *, generates: bool) -> bool:
    """Return whether an engine supports the model's settings."""
    engine = allocation.backend
    if model.implementation == HF:
        return not hf_problems(model, allocation, split=not BACKENDS[engine].serves)
    if can(engine, "rollouts"):  # Generation receives merged weights and needs no offloading.
        return True
    needs = {
        "adapters": model.lora is not None,
        "averages": model.ema is not None,
        "cpu_offload": model.cpu_offload,
        "generation": generates,
    }
    return all(can(engine, need) for need, needed in needs.items() if needed)


def _models(demand: MemoryDemand, allocation: Allocation, name: str) -> Iterator[Model]:
    """Yield copies of a model's section with settings that do not change the result of training."""
    model = demand.model
    if name == ROLLOUTS:
        yield model.model_copy(update={"model": None})
        return
    tokens = sorted({model.max_tokens_per_microbatch, *MICROBATCHES})
    modes: Sequence[str] = CHECKPOINTING if demand.trained else (model.recompute,)
    if model.implementation == HF:
        modes = [mode for mode in modes if mode != "selective"]
    away = (model.offload,) if demand.trained else (False, True)
    stages = VIRTUAL if allocation.sizes["pp"] > 1 else (1,)
    for number, mode, offload, virtual in product(tokens, modes, away, stages):
        sizes = (model.model or ParallelSizes()).model_copy(
            update={
                **dict.fromkeys(FIELDS.values()),
                "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
            }
        )
        yield model.model_copy(
            update={
                "backend": str(allocation),
                "gpus": "",
                "gradient_checkpointing": mode,
                "max_tokens_per_microbatch": number,
                "offload": offload,
                "model": sizes if virtual > 1 or model.model else None,
            }
        )


def unbeaten(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates, the fastest first.

    Omit candidates that are both slower and larger than another candidate.
    """
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda each: each.key):
        if not any(_is_as_small(other.memory, one.memory) for other in kept):
            kept.append(one)
    return kept


def _is_as_small(one: Memory, other: Memory) -> bool:
    return (
        one.standing <= other.standing
        and one.computing <= other.computing
        and one.kv_cache <= other.kv_cache
    )
