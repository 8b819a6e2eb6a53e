"""The search for the fastest combinations of layouts that fit into the GPUs.

A combination has one candidate for each model. The predicted seconds of a step are the sum over the
models. If rollout tasks generate during the other calls, only the longer of both counts. A queue
yields the combinations in the order of their seconds, so the first combinations that fit are the
best. The search is deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Config, Model, Rollout, role_key
from slurmrl.config.source import dotted
from slurmrl.errors import AllocationError, UsageError
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.dataflow import Method
from slurmrl.plan.engine_rules import can
from slurmrl.plan.estimates.call_costs import (
    Checked,
    MeanTokens,
    Variant,
    memory_bytes,
    placed_models,
)
from slurmrl.plan.estimates.hardware import hardware_of
from slurmrl.plan.estimates.step_seconds import StepSeconds, predict_step, tasks_overlap
from slurmrl.plan.estimates.worker_memory import Fullest, fullest_gpu
from slurmrl.plan.inherited_settings import ROLLOUT_FIELDS
from slurmrl.plan.placement import OWN, ROLLOUTS, in_tasks, place, uses_base
from slurmrl.plan.settings import Settings
from slurmrl.search.candidates import Candidate, of_model

Objective: TypeAlias = Literal["time", "cost"]
MOST_COMBINATIONS: Final = 200_000
"""Maximum number of combinations to try for each way to use the GPUs."""
MOST_REJECTED: Final = 20
"""Maximum number of rejected combinations that fit into memory, for each way to use the GPUs."""


@dataclass(frozen=True)
class SearchRequest:
    """The numbers of GPUs, the lengths and the engines of a search."""

    gpus: tuple[int, ...]
    """Total numbers of GPUs to try; each number includes the GPUs of rollout tasks."""
    mean: MeanTokens
    engines: frozenset[str]
    """Engines to try in addition to the engines of the configuration."""
    objective: Objective = "time"
    results: int = 5
    gpu_seconds: float = math.inf
    """Maximum GPU seconds of a step."""


@dataclass(frozen=True)
class Answer:
    """A combination of settings with its prediction."""

    gpus: int
    overrides: Mapping[str, Any]
    """Mapping from dotted key to value, for settings that differ from the configuration."""
    backends: Mapping[str, str]
    """Mapping from the name of each model, and of generation, to its layout."""
    actor: Model
    step: StepSeconds
    fullest: Fullest
    learned: Mapping[str, str] = field(default_factory=dict)
    """Mapping from overrides that change the result of training to the name of their change."""
    follows: tuple[str, ...] = ()
    """Sentences about settings of the algorithm whose defaults the changes alter."""

    @property
    def gpu_seconds(self) -> float:
        """Seconds of a step multiplied by the number of GPUs."""
        return self.gpus * self.step.total


class ModelPart(NamedTuple):
    """A model of the plan, and the GPUs and engines that it may use."""

    name: str
    gpus: int
    engines: list[str]
    generates: bool
    """Whether the model's ranks also generate."""


class GpuUse(NamedTuple):
    """A way to use the GPUs: the number of trainers' GPUs, and the engine that generates."""

    gpus: int
    """Number of GPUs of the trial."""
    trainers: int
    """Number of GPUs of the trainers."""
    generation: str
    """Name of a separate engine for generation; empty if the actor's ranks generate."""


def search(
    checked: Settings,
    request: SearchRequest,
    load: Callable[[Mapping[str, Any]], Settings | None],
    progress: Callable[[str], None] = lambda line: None,
    known: Sequence[Answer] = (),
) -> list[Answer]:
    """Return the best among all combinations and the ``known`` answers, the best first.

    ``load`` loads the configuration with a combination's overrides and runs all checks of a
    submission; it returns None if a check fails. ``progress`` receives a line for each way to use
    the GPUs.

    Raises UsageError if the seconds of a step cannot be predicted.
    """
    _require_numbers(checked)
    found = list(known)
    for scheme in (way for gpus in request.gpus for way in ways(checked, request, gpus)):
        made = f"generation by {scheme.generation}" if scheme.generation else "the actor generates"
        progress(f"{scheme.gpus} GPUs, {made}: {len(found)} combinations fit")
        found += _best(checked, request, scheme, found, load)
        found.sort(key=lambda one: _order(request, one))
        del found[request.results :]
    return found


def fits_into_memory(checked: Checked) -> bool:
    """Return whether the estimate for the fullest GPU, plus a margin, fits into its memory."""
    limit, fullest = memory_bytes(checked.config.cluster), fullest_gpu(checked)
    return limit is None or fullest.size + fullest.margin <= limit


def _agrees(loaded: Settings, answer: Answer, request: SearchRequest) -> bool:
    """Return whether a configuration with an answer's overrides has the answer's prediction."""
    step = predict_step(loaded, request.mean)
    return step is not None and math.isclose(step.total, answer.step.total, rel_tol=1e-6)


def _require_numbers(checked: Checked) -> None:
    config = checked.config
    on_cpus = config.cluster.gpus_per_worker == 0
    if hardware_of(config.cluster) is None:
        raise UsageError(
            "the speed of these CPUs is unknown: measure it with slurmrl "
            "profile-cluster, or remove cluster.gpus_per_worker=0 to search layouts on GPUs"
            if on_cpus
            else "the search needs the type of the GPUs: set cluster.slurm.gpu_type, for example "
            "to h100, or cluster.hardware"
        )
    if memory_bytes(config.cluster) is None and not on_cpus:
        kind = config.cluster.slurm.gpu_type
        gpus = f"GPUs of type {kind}" if kind else "these GPUs"
        raise UsageError(
            f"the memory of {gpus} is unknown: set cluster.gpu_memory, for example to 80G"
        )
    if predict_step(checked) is None:
        said = "the seconds of a step cannot be predicted: the architecture or a length is unknown"
        problems = checked.missing if isinstance(checked, Settings) else ()
        raise UsageError("\n  ".join([said, *map(str, problems)]))


def _order(request: SearchRequest, answer: Answer) -> tuple[float, float, int, str]:
    """Return the sorting key of an answer: its objective, then GPU seconds and changes."""
    first = answer.step.total if request.objective == "time" else answer.gpu_seconds
    return first, answer.gpu_seconds, len(answer.overrides), str(answer.overrides)


def ways(checked: Checked, request: SearchRequest, gpus: int) -> Iterator[GpuUse]:
    """Yield the ways to use ``gpus`` GPUs without a change of the result of training.

    A configuration keeps its rollout tasks; a configuration without tasks gets none.
    """
    config = checked.config
    own = _engine(config.rollout.backend)
    engines = sorted(
        engine for engine in {*request.engines, *([own] if own else [])} if can(engine, "rollouts")
    )
    if not _generates(checked):
        yield GpuUse(gpus, gpus, "")
    elif config.rollout.backend and in_tasks(config.rollout):
        for engine in engines:
            for trainers in _splits(gpus):
                yield GpuUse(gpus, trainers, engine)
    else:
        yield GpuUse(gpus, gpus, "")
        for engine in engines:
            yield GpuUse(gpus, gpus, engine)


def _splits(gpus: int) -> Iterator[int]:
    """Yield numbers of GPUs for the trainers; rollout tasks use the other GPUs.

    The numbers are eighths of all GPUs, powers of two, and numbers that leave a power of two.
    Powers of two often divide batches and heads.
    """
    parts = {gpus * eighths // 8 for eighths in range(1, 8)}
    powers = [2**power for power in range(gpus.bit_length()) if gpus <= 16 * 2**power]
    parts |= {part for power in powers for part in (power, gpus - power)}
    yield from sorted(part for part in parts if 0 < part < gpus)


def _engine(backend: str) -> str:
    """Return the engine in a backend string; empty for an empty string."""
    return parse(backend).backend if backend.strip() else ""


def _best(
    checked: Settings,
    request: SearchRequest,
    scheme: GpuUse,
    found: Sequence[Answer],
    load: Callable[[Mapping[str, Any]], Settings | None],
) -> list[Answer]:
    """Return the best answers for one way to use the GPUs that may be better than ``found``."""
    start, parts = parts_of(checked, request, scheme)
    base = start.config
    lists = [
        of_model(start, one.name, one.gpus, one.engines, request.mean, generates=one.generates)
        for one in parts
    ]
    limit = memory_bytes(base.cluster) or math.inf
    kept: list[Answer] = []
    rejected = 0
    apart = scheme.gpus > scheme.trainers and tasks_overlap(base.rollout)
    for number, chosen in enumerate(_in_order(_possible(lists, limit), apart=apart)):
        bound = sorted(_order(request, one)[0] for one in (*found, *kept))
        if number == MOST_COMBINATIONS or len(kept) == request.results:
            break
        least = _least(chosen, apart=apart)
        if least * scheme.gpus > request.gpu_seconds:
            break
        first = least if request.objective == "time" else least * scheme.gpus
        if len(bound) >= request.results and first > bound[request.results - 1]:
            break
        if _least_bytes(chosen) > limit:
            continue
        if any(_main(_layouts(chosen)) == _main(one.backends) for one in kept):
            continue
        answer = _answer(checked, start, scheme, chosen, request)
        if answer is None or answer.gpu_seconds > request.gpu_seconds:
            continue
        loaded = load(answer.overrides)
        if loaded is not None and _agrees(loaded, answer, request):
            kept.append(answer)
        elif (rejected := rejected + 1) == MOST_REJECTED:
            break
    return kept


def parts_of(
    checked: Settings, request: SearchRequest, scheme: GpuUse
) -> tuple[Variant, list[ModelPart]]:
    """Return the configuration for one way to use the GPUs, and the models that it places."""
    start = _cleared(checked, scheme)
    parts = []
    training = {engine for engine in request.engines if can(engine, "training")}
    engines = sorted({*training, _engine(start.config.actor.backend)})
    for name in placed_models(start):
        if name == ROLLOUTS and not scheme.generation:
            continue  # Only evaluations generate.
        if name == ROLLOUTS:
            count = scheme.gpus - scheme.trainers or scheme.gpus
            parts.append(ModelPart(name, count, [scheme.generation], generates=False))
            continue
        generates = name == "actor" and not scheme.generation and _generates(start)
        parts.append(ModelPart(name, scheme.trainers, engines, generates=generates))
    return start, parts


def _generates(checked: Checked) -> bool:
    calls = checked.algorithm.calls(checked.config)
    return any(call.method is Method.GENERATE for call in calls)


def _layouts(chosen: Sequence[Candidate]) -> dict[str, str]:
    return {one.name: str(one.allocation) for one in chosen}


def _possible(lists: Sequence[Sequence[Candidate]], limit: float) -> list[list[Candidate]]:
    """Return each model's candidates that fit if all other models take the least memory."""
    smallest = [
        min((one.memory.standing for one in each if one.name != ROLLOUTS), default=0)
        for each in lists
    ]
    return [
        [one for one in each if _least_bytes([one]) + sum(smallest) - least <= limit]
        for each, least in zip(lists, smallest, strict=True)
    ]


def _least_bytes(chosen: Sequence[Candidate]) -> int:
    """Return a lower bound of the bytes on a trainers' GPU: all models, and the largest call."""
    trainers = [one.memory for one in chosen if one.name != ROLLOUTS]
    computing = max((memory.computing for memory in trainers), default=0)
    return sum(memory.standing for memory in trainers) + computing


def _main(backends: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the layouts that distinguish answers: the actor's layout and generation's layout."""
    return backends.get("actor"), backends.get(ROLLOUTS)


def _least(chosen: Sequence[Candidate], *, apart: bool) -> float:
    """Return a lower bound of a combination's seconds.

    With ``apart``, rollout tasks generate during the other calls.
    """
    tasks = sum(one.seconds for one in chosen if apart and one.name == ROLLOUTS)
    others = sum(one.seconds for one in chosen if not (apart and one.name == ROLLOUTS))
    return max(tasks, others)


def _in_order(
    lists: Sequence[Sequence[Candidate]], *, apart: bool = False
) -> Iterator[tuple[Candidate, ...]]:
    """Yield the combinations of one candidate of each list, in the order of `_least`.

    Among equal combinations, the smaller sum of seconds comes first. The lists must be sorted by
    their candidates' seconds.
    """
    if not all(lists):
        return

    def at(places: tuple[int, ...]) -> tuple[Candidate, ...]:
        return tuple(one[place] for one, place in zip(lists, places, strict=True))

    def entry(places: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        chosen = at(places)
        return _least(chosen, apart=apart), sum(one.seconds for one in chosen), places

    first = (0,) * len(lists)
    queue, seen = [entry(first)], {first}
    while queue:
        *_, places = heapq.heappop(queue)
        yield at(places)
        for axis, current in enumerate(places):
            after = (*places[:axis], current + 1, *places[axis + 1 :])
            if current + 1 < len(lists[axis]) and after not in seen:
                seen.add(after)
                heapq.heappush(queue, entry(after))


def _cleared(checked: Checked, scheme: GpuUse) -> Variant:
    """Return the configuration with the engine of ``scheme`` and without a number of hosts."""
    config = checked.config
    cluster = config.cluster.model_copy(update={"hosts": None})
    rollout = config.rollout
    apart = scheme.gpus > scheme.trainers
    if scheme.generation:
        gpus = "" if apart else f"0-{scheme.gpus - 1}" if scheme.gpus > 1 else "0"
        count = scheme.gpus - scheme.trainers or scheme.gpus
        rollout = rollout.model_copy(
            update={
                **dict.fromkeys(ROLLOUT_FIELDS.values()),
                "backend": f"{scheme.generation}:d{count}",
                "gpus": gpus,
            }
        )
    elif rollout.backend and (_generates(checked) or not _has_room(rollout, scheme.gpus)):
        rollout = rollout.model_copy(
            update={
                **dict.fromkeys(ROLLOUT_FIELDS.values()),
                "backend": "",
                "gpus": "",
                "offload": None,
            }
        )
    return Variant(
        config.model_copy(update={"cluster": cluster, "rollout": rollout}), checked.algorithm
    )


def _has_room(rollout: Rollout, gpus: int) -> bool:
    """Return whether the engine of evaluations fits into a number of GPUs."""
    try:
        return place(rollout.backend, rollout.gpus).allocation.world_size <= gpus
    except AllocationError:
        return False


def _answer(
    checked: Settings,
    start: Variant,
    scheme: GpuUse,
    chosen: Sequence[Candidate],
    request: SearchRequest,
) -> Answer | None:
    """Return a combination with its prediction; None if it does not fit into the GPUs."""
    config = start.config
    models = {one.name: one.model for one in chosen if one.name != ROLLOUTS}
    actor = models["actor"]
    for use in uses_of(config, checked.algorithm):
        if uses_base(config, use.role):  # The role is the actor without adapters.
            same = {name: getattr(actor, name) for name in OWN}
            models[use.role] = config.model(use.role).model_copy(update=same)
    config = config.with_models(models)
    for one in chosen:
        if one.name == ROLLOUTS:
            rollout = config.rollout.model_copy(update={"backend": str(one.allocation)})
            config = config.model_copy(update={"rollout": rollout})
    variant = replace(start, config=config)
    limit = memory_bytes(config.cluster)
    fullest = fullest_gpu(variant)
    if limit is not None and fullest.size + fullest.margin > limit:
        return None
    step = predict_step(variant, request.mean)
    if step is None:
        return None
    trained = {use.role for use in uses_of(config, checked.algorithm) if use.trained}
    return Answer(
        gpus=scheme.gpus,
        overrides=_overrides(checked, config, models, trained),
        backends=_layouts(chosen),
        actor=actor,
        step=step,
        fullest=fullest,
    )


INHERITED: Final = ("backend", "max_tokens_per_microbatch", "recompute")
"""Settings that other roles inherit from the actor. Only trained roles inherit ``recompute``."""


def _overrides(
    settings: Settings, after: Config, models: Mapping[str, Model], trained: Container[str]
) -> dict[str, Any]:
    """Return the settings, by dotted key, that turn the configuration into ``after``."""
    before, changed = settings.config, dict[str, Any]()
    for role, model in models.items():
        where, old = dotted(role_key(role)), before.model(role)
        for name in INHERITED if role in trained else INHERITED[:2]:
            key = "gradient_checkpointing" if name == "recompute" else name
            inherits = role != "actor" and not settings.source.writes(*role_key(role), key)
            expected = models["actor"] if inherits else old
            if getattr(model, name) != getattr(expected, name):
                changed[f"{where}.{key}"] = getattr(model, name)
        for name in ("gpus", "offload"):
            if getattr(model, name) != getattr(old, name):
                changed[f"{where}.{name}"] = getattr(model, name)
        expected_sizes = _sizes(old)
        if role != "actor" and not settings.source.writes(*role_key(role), "model"):
            own = (
                settings.source.writes(*role_key(role), "backend") or f"{where}.backend" in changed
            )
            expected_sizes = {} if own else _sizes(models["actor"])
        if _sizes(model) != expected_sizes:
            changed[f"{where}.model"] = _sizes(model)
    for name in ("backend", "gpus", "offload", *ROLLOUT_FIELDS.values()):
        value = getattr(after.rollout, name)
        if value != getattr(before.rollout, name):
            changed[f"rollout.{name}"] = value
    if before.cluster.hosts is not None:
        changed["cluster.hosts"] = None
    return changed


def _sizes(model: Model) -> dict[str, Any]:
    """Return the fields of the section ``model`` that differ from their defaults."""
    return {} if model.model is None else model.model.model_dump(exclude_defaults=True)
