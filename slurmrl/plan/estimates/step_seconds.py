"""Predicted seconds of a step: its calls, moves of weights, and other work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Config, Model, Rollout
from slurmrl.plan.dataflow import Method
from slurmrl.plan.estimates.call_costs import Checked, MeanTokens, cost, memories, placed_models
from slurmrl.plan.estimates.hardware import Hardware, hardware_of
from slurmrl.plan.estimates.memory import whole_weights
from slurmrl.plan.estimates.pass_seconds import Seconds
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.placement import LARGEST_HOST, ROLLOUTS, Placement, layout_of, offloaded
from slurmrl.run.reports import TRAINERS


@dataclass(frozen=True)
class StepSeconds:
    """Predicted seconds of a step."""

    calls: Mapping[str, Seconds]
    """Mapping from a call's name to its seconds by cause."""
    moves: float = 0.0
    """Seconds to move weights to the engine that generates, and offloaded models to and from host
    memory."""
    asynchronous: frozenset[str] = field(default_factory=frozenset)
    """Names of the calls that rollout tasks execute."""
    rest: float = 0.0
    """Seconds outside calls and moves, as a share of the seconds of calls and moves."""
    overlaps: bool = True
    """Whether rollout tasks execute their calls during the trainers' calls."""

    @property
    def total(self) -> float:
        """Seconds from the start of a step to the start of the next step."""
        tasks, trainers = self._of(apart=True), self._of(apart=False) + self.moves
        return (max(tasks, trainers) if self.overlaps else tasks + trainers) * (1 + self.rest)

    @property
    def of_trainers(self) -> float:
        """Seconds of a step without the calls of rollout tasks."""
        return (self._of(apart=False) + self.moves) * (1 + self.rest)

    @property
    def causes(self) -> Seconds:
        """Seconds of all calls and moves by cause, the largest first."""
        found: Counter[str] = Counter({"moves of weights": self.moves})
        for seconds in self.calls.values():
            found.update(seconds)
        return {cause: value for cause, value in found.most_common() if value > 0}

    def _of(self, *, apart: bool) -> float:
        return sum(
            sum(seconds.values())
            for name, seconds in self.calls.items()
            if (name in self.asynchronous) == apart
        )


def predict_step(checked: Checked, mean: MeanTokens | None = None) -> StepSeconds | None:
    """Return the seconds of a step; None if a GPU, an architecture or the lengths are unknown.

    Without ``mean``, sequences have their maximum length. Rule-based rewards take no time.
    """
    config, placed = checked.config, placed_models(checked)
    hardware = hardware_of(config.cluster)
    if hardware is None:
        return None
    rates = hardware.efficiency
    calls, apart, generates = {}, set(), False
    for call in checked.algorithm.calls(config):
        name = layout_of(call, list(placed))
        if call.role is None or name not in placed:
            continue
        found = cost(checked, call, placed, mean)
        if found is None or found.parts is None:
            return None
        calls[call.name] = found.parts
        generates |= call.method is Method.GENERATE
        if call.method is Method.GENERATE and placed[name].group != TRAINERS:
            apart.add(call.name)
    moves = 0.0
    if generates and ROLLOUTS in placed:
        moves += moves_to_rollouts(config, placed[ROLLOUTS])
    sizes = memories(checked)
    for name in offloaded(config, placed) - {ROLLOUTS}:
        if name in sizes:
            moves += 2 * sizes[name].standing / rates.host_link
    return StepSeconds(calls, moves, frozenset(apart), rates.rest, tasks_overlap(config.rollout))


def tasks_overlap(rollout: Rollout) -> bool:
    """Return whether rollout tasks generate during the trainers' calls.

    Without staleness, each step waits for completions that its weights have sampled.
    """
    return rollout.tasks is None or rollout.tasks.max_staleness > 0


def moves_to_rollouts(config: Config, placed: Placement) -> float:
    """Return the seconds of a step to move the actor's weights to the engine that generates.

    Return 0 for rollout tasks, which load weights during the other calls.
    """
    hardware = hardware_of(config.cluster)
    if hardware is None or placed.group != TRAINERS:
        return 0.0
    hosts_gpus = config.cluster.workers_per_host or LARGEST_HOST
    return moved_weights(config.actor, placed.allocation, hardware, hosts_gpus)


def moved_weights(
    actor: Model, target: Allocation, hardware: Hardware, gpus_per_host: int
) -> float:
    """Return the seconds in which each rank of ``target`` receives the actor's weights."""
    shape = shape_of(actor)
    if shape is None:
        return 0.0
    gpu, share = hardware.gpu, hardware.efficiency.links
    rate = gpu.link if target.world_size <= gpus_per_host else gpu.network
    return whole_weights(shape, target, actor.dtype) / (rate * share)
