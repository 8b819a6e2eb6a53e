"""Complete the configuration: inherited settings, defaults of the algorithm, and layouts.

Roles inherit settings from the actor, and the precision depends on the device. ``allocation_mode``
and sizes in Megatron's terms become the roles' backend strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.config.allocation import (
    AXES,
    Allocation,
    Components,
    ExpertSizes,
    parse,
    parse_components,
)
from slurmrl.config.allocation.allocation import ARCHON, BACKENDS, SPELLED
from slurmrl.config.allocation.legacy_spellings import (
    ROLES,
    HostShape,
    Placed,
    parse_legacy,
    spelled,
)
from slurmrl.config.allocation.parser import format_gpus, parse_gpus
from slurmrl.config.schema import Cluster, Config, Model, ParallelSizes, Publish, Rollout, role_key
from slurmrl.config.source import Source
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan.algorithms import Algorithm, uses_of
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.shape import known_config
from slurmrl.registry import resolve

DEFAULT_ENGINE: Final = "fsdp"
DEFAULT_BACKEND: Final = "fsdp:d1"
TASKS_BACKEND: Final = "native:d1"
WITHOUT_ENCODER: Final = "slurmrl.models.families:WITHOUT_ENCODER"
"""Name of a table in a room that ``plan`` must not import."""
OWN_WEIGHTS: Final = ("teacher", "reward_model")
"""Roles that never start from the actor's weights: a copy could not teach the actor."""
INHERITED: Final = (
    "implementation",
    "dtype",
    "fp8",
    "gradient_checkpointing",
    "transformer_engine",
    "max_tokens_per_microbatch",
)


def complete(config: Config, algorithm: Algorithm, source: Source) -> tuple[Config, list[Problem]]:
    """Return the complete configuration, and a problem for each size that is set to two values.

    The result has a complete section for every role that the algorithm uses, and every layout as a
    backend string.
    """
    problems: list[Problem] = []
    actor = config.actor.model_copy(
        update={
            "backend": config.actor.backend
            or (DEFAULT_ENGINE if given(config.actor) else DEFAULT_BACKEND),
            "tokenizer": config.actor.tokenizer or config.actor.path,
        }
    )
    roles = {use.role: _from_actor(config, use.role, actor) for use in uses_of(config, algorithm)}
    roles["actor"] = actor
    vision = any(each.media_keys for each in config.datasets().values())
    vision |= any(each.vision or each.train_vision for each in roles.values())
    for role, each in roles.items():
        model = _with_vision(each) if vision else each
        inherits = role != "actor" and model.model is actor.model
        merged, conflicts = _merged(config, model)
        roles[role] = merged
        if not inherits:
            problems += [
                source.problem((*role_key(role), "model", conflict.field), conflict.message)
                for conflict in conflicts
            ]
    config = config.model_copy(update={"rollout": _with_completions(config.rollout, algorithm)})
    config = _with_pass_score(config)
    if algorithm.one_pass:
        config = _for_one_pass(config)
    rollout, conflicts = _rollout(config)
    problems += [
        source.problem(("rollout", conflict.field), conflict.message) for conflict in conflicts
    ]
    return config.with_models(roles).model_copy(update={"rollout": rollout}), problems


def _with_completions(rollout: Rollout, algorithm: Algorithm) -> Rollout:
    """Return the section with the algorithm's default number of completions of a prompt.

    Greedy sampling keeps the number 1, because all completions would be the same.
    """
    if "n" in rollout.model_fields_set or rollout.greedy:
        return rollout
    return rollout.model_copy(update={"n": algorithm.completions})


def _with_pass_score(config: Config) -> Config:
    """Return the configuration with each evaluation's `pass_score`, if its reward defines one."""
    evaluation = config.evaluation
    if evaluation is None or evaluation.pass_score is not None:
        return config
    update: dict[str, Any] = {"pass_score": config.default_pass_score}
    if evaluation.suites:  # Each suite has its own value, because its reward may differ.
        evaluations = config.evaluations
        update = {
            "suites": {
                name: suite.model_copy(update={"pass_score": evaluations[name].default_pass_score})
                if suite.pass_score is None
                else suite
                for name, suite in evaluation.suites.items()
            }
        }
    return config.model_copy(update={"evaluation": evaluation.model_copy(update=update)})


def _for_one_pass(config: Config) -> Config:
    """Return a configuration with the rows in file order, and a commit after each step.

    Keep the user's choices. A commit costs less than repeating a step after a kill.
    """
    dataset, checkpoint = config.dataset, config.checkpoint
    if "shuffle" not in dataset.model_fields_set:
        dataset = dataset.model_copy(update={"shuffle": False})
    if checkpoint.model_fields_set.isdisjoint(("every_steps", "every_seconds", "every_epochs")):
        checkpoint = checkpoint.model_copy(update={"every_steps": 1})
    return config.model_copy(update={"dataset": dataset, "checkpoint": checkpoint})


def _from_actor(config: Config, role: str, actor: Model) -> Model:
    model: Model = config.find_model(role) or Model()
    update: dict[str, Any] = {
        name: getattr(actor, name) for name in INHERITED if name not in model.model_fields_set
    }
    update |= _layout_from_actor(model, actor)
    update["tokenizer"] = model.tokenizer or actor.tokenizer
    if model.path is None and model.architecture is None and role not in OWN_WEIGHTS:
        update |= {"path": actor.path, "architecture": actor.architecture}
    return model.model_copy(update=update)


def _layout_from_actor(model: Model, actor: Model) -> dict[str, Any]:
    """Return the actor's layout, or only its engine if the role sets sizes."""
    if model.backend:
        return {}
    if given(model):
        return {"backend": actor.backend.partition(":")[0]}
    return {
        "backend": actor.backend,
        "gpus": model.gpus or actor.gpus,
        "model": model.model or actor.model,
    }


def _with_vision(model: Model) -> Model:
    """Return the model with its image encoder if the encoder is optional in its family."""
    if model.implementation != HF:
        return model
    known = known_config(model).get("model_type") in resolve(WITHOUT_ENCODER)
    return model.model_copy(update={"vision": True}) if known else model


def _merged(config: Config, model: Model) -> tuple[Model, list[Disagreement]]:
    shape = shape_of(config)
    gpus = shape.hosts * shape.gpus_per_host if config.cluster.hosts else None
    backend, found = merge(model.backend, given(model), gpus)
    conflicts = [Disagreement(FIELDS[axis], message) for axis, message in found]
    return model.model_copy(update={"backend": backend}), conflicts


def _rollout(config: Config) -> tuple[Any, list[Disagreement]]:
    rollout = _of_tasks(config.rollout)
    given = _given(rollout, ROLLOUT_FIELDS)
    if given and not rollout.backend:
        axis, size = next(iter(given.items()))
        message = f"{size} is not allowed without rollout.backend, which names the engine"
        return rollout, [Disagreement(ROLLOUT_FIELDS[axis], message)]
    backend, found = merge(rollout.backend, given, None)
    if rollout.servers and is_engine_only(backend):
        backend = f"{backend.strip()}:d1"  # Running servers choose their layouts.
    if rollout.tasks is not None:
        backend = _for_each(backend, rollout.tasks.max, _listed(rollout.gpus))
    conflicts = [Disagreement(ROLLOUT_FIELDS[axis], message) for axis, message in found]
    return rollout.model_copy(update={"backend": backend}), conflicts


def _of_tasks(rollout: Rollout) -> Rollout:
    """Return the section with an engine and weight versions if there are rollout tasks."""
    if rollout.tasks is None:
        return rollout
    backend, publish = rollout.backend or TASKS_BACKEND, rollout.publish or Publish()
    return rollout.model_copy(update={"backend": backend, "publish": publish})


def _listed(gpus: str) -> int:
    """Return the number of GPUs of the trainers' job for tasks; 0 for separate jobs."""
    try:
        return len(parse_gpus(gpus)) if gpus.strip() else 0
    except AllocationError:
        return 0  # The check of GPUs reports the error.


def _for_each(backend: str, tasks: int | None, gpus: int) -> str:
    """Return the layout of ``tasks`` tasks, or of the tasks that fill ``gpus`` GPUs."""
    try:
        one = parse(f"{backend.strip()}:d1" if is_engine_only(backend) else backend)
    except AllocationError:
        return backend  # The check of allocation strings reports the error.
    count = tasks or gpus // one.instance_size
    if not count or one.sizes["dp"] > 1:
        return str(one)
    return str(replace(one, sizes={**one.sizes, "dp": count}))


FIRST_GPU: Final = Path("/dev/nvidia0")
ON_GPUS: Final = "bfloat16"
ON_CPUS: Final = "float32"
"""Default data type on CPUs, because bfloat16 is slower than float32 on most CPUs."""


def gpus_per_worker(cluster: Cluster, scheduler: str) -> int:
    """Return the GPUs of one worker. ``scheduler`` is ``"local"`` or ``"slurm"``."""
    if cluster.gpus_per_worker is not None:
        return cluster.gpus_per_worker
    return 1 if scheduler != "local" or FIRST_GPU.exists() else 0


def with_precision(config: Config, scheduler: str) -> Config:
    """Return the configuration with the actor's default precision, if the actor sets none.

    The other roles inherit this precision. A trial keeps its precision, because its resolved
    configuration sets all values.
    """
    if "dtype" in config.actor.model_fields_set:
        return config
    dtype = ON_GPUS if gpus_per_worker(config.cluster, scheduler) else ON_CPUS
    return config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": dtype})})


FIELD: Final = "allocation_mode"
ROLLOUT: Final = "rollout"
UNTRAINED: Final = ("evaluate", "generate")
"""Algorithms for which ``allocation_mode`` may contain only servers."""
USUAL_GPUS_PER_HOST: Final = 8


def apply(config: Config, source: Source) -> tuple[Config, list[Problem], list[str]]:
    """Replace ``allocation_mode`` with backend strings of the roles.

    Return the configuration, the problems found, and a note with the current spelling.
    """
    text = config.allocation_mode
    if not text.strip():
        return config, [], []
    without = config.model_copy(update={FIELD: ""})
    twice = list(_written_twice(config))
    if twice:
        message = f"'{text}' is not allowed together with {', '.join(twice)}: leave out {FIELD}"
        return without, [source.problem((FIELD,), message)], []
    try:
        trains = config.algorithm.get("name") not in UNTRAINED
        placed = read(text, shape_of(config), trains=trains)
    except AllocationError as error:
        return without, [source.problem((FIELD,), str(error))], []
    if config.rollout.tasks is None and not config.rollout.servers:
        placed = in_one_job(placed)
    lines = [*spelled(placed)]
    if _serves(placed) and config.rollout.python is None and not config.rollout.servers:
        lines.append(f"rollout.python: a Python with {placed[ROLLOUT].allocation.backend}")
    note = f"{FIELD} is deprecated; write instead: {', '.join(lines)}"
    if ARCHON in text:
        note += " (archon runs as megatron with p, e or expert layouts, else as fsdp)"
    return _placed(without, placed), [], [note]


def shape_of(config: Config) -> HostShape:
    return HostShape(
        config.cluster.hosts or 1, config.cluster.workers_per_host or USUAL_GPUS_PER_HOST
    )


def read(text: str, shape: HostShape, *, trains: bool = True) -> dict[str, Placed]:
    """Return a mapping from roles to layouts in a string of the current or the legacy grammar.

    Without training, an actor without a layout uses the GPUs of the servers. Raises the
    AllocationError of the grammar that parsed more of the string.
    """
    try:
        components = parse_components(text)
    except AllocationError as current:
        try:
            placed = parse_legacy(text, shape, trains=trains)
        except AllocationError as legacy:
            raise max(legacy, current, key=_position) from None
    else:
        placed = of_components(components, trains=trains)
    if "actor" in placed or not _serves(placed):
        return placed
    size = placed[ROLLOUT].allocation.world_size
    actor = Placed(parse(f"fsdp:d{size}"))
    return {"actor": actor, ROLLOUT: replace(placed[ROLLOUT], gpus=format_gpus(range(size)))}


def in_one_job(placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return the layouts with GPUs for servers: the GPUs after the trainers' GPUs."""
    if not _serves(placed) or placed[ROLLOUT].gpus:
        return dict(placed)
    trainers = [place for role, place in placed.items() if role != ROLLOUT]
    first = max(max(_gpus_of(place), default=-1) for place in trainers) + 1
    size = placed[ROLLOUT].allocation.world_size
    beside = replace(placed[ROLLOUT], gpus=format_gpus(range(first, first + size)))
    return {**placed, ROLLOUT: beside}


def _gpus_of(place: Placed) -> Sequence[int]:
    return parse_gpus(place.gpus) if place.gpus else range(place.allocation.world_size)


def _serves(placed: Mapping[str, Placed]) -> bool:
    return ROLLOUT in placed and BACKENDS[placed[ROLLOUT].allocation.backend].serves


def explain(text: str) -> dict[str, Any]:
    """Return the sizes of a layout as plain values.

    For a string of an earlier system, the result also has the current spelling (``write_instead``).
    Words such as ``pipe_model`` apply to one host with `USUAL_GPUS_PER_HOST` GPUs. Raises
    AllocationError.
    """
    try:
        return parse_components(text).explain()
    except AllocationError:
        placed = in_one_job(read(text, HostShape(1, USUAL_GPUS_PER_HOST), trains=False))
    parts = [replace(place.allocation, name=role).explain() for role, place in placed.items()]
    return {"string": text, "write_instead": list(spelled(placed)), "components": parts}


def of_components(components: Components, *, trains: bool = True) -> dict[str, Placed]:
    """Return a mapping from roles to layouts.

    Components have the names of roles. A component without a name is the rollout if its engine
    cannot train, else the actor. Raises AllocationError for two components of one role, and if a
    trial that ``trains`` has no actor.
    """
    roles: dict[str, Placed] = {}
    start = 0
    for place in components.places:
        apart = all(BACKENDS[allocation.backend].serves for allocation in place)
        for allocation in place:
            backend = BACKENDS[allocation.backend]
            role = allocation.name or ("actor" if backend.trains else "rollout")
            if role not in ROLES:
                known = ", ".join(ROLES)
                raise AllocationError(f"'{allocation}': '{role}' is not a role; allowed: {known}")
            if role in roles:
                raise AllocationError(f"'{components}' has two layouts for the {role}")
            pinned = not apart and (start > 0 or backend.serves)
            gpus = format_gpus(range(start, start + allocation.world_size)) if pinned else ""
            roles[role] = Placed(allocation, gpus)
        start += 0 if apart else place[0].world_size
    if "actor" not in roles and (trains or not _serves(roles)):
        raise AllocationError(f"'{components}': no component trains the actor")
    return roles


def _position(error: AllocationError) -> int:
    return -1 if error.position is None else error.position


def _written_twice(config: Config) -> Iterator[str]:
    for role in ROLES:
        section = getattr(config, role)
        if section is None:
            continue
        for field in ("backend", "gpus"):
            if getattr(section, field, None):
                yield f"{role}.{field}"


def _placed(config: Config, placed: Mapping[str, Placed]) -> Config:
    update = {}
    for role, layout in placed.items():
        section = getattr(config, role) or Model()
        update[role] = section.model_copy(update={"backend": layout.backend, "gpus": layout.gpus})
    return config.model_copy(update=update)


FIELDS: Final = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
ROLLOUT_FIELDS: Final = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


class Disagreement(NamedTuple):
    """A message about a field whose size differs from the backend string."""

    field: str
    message: str


def given(model: Model) -> dict[str, int]:
    """Return a mapping from axes to the sizes that the section ``model`` of a role sets."""
    return _given(model.model or ParallelSizes(), FIELDS)


def _given(section: ParallelSizes | Rollout, fields: dict[str, str]) -> dict[str, int]:
    values = {axis: getattr(section, field) for axis, field in fields.items()}
    return {axis: size for axis, size in values.items() if size is not None}


def is_engine_only(backend: str) -> bool:
    return backend.strip() in SPELLED


def merge(
    backend: str, sizes: dict[str, int], gpus: int | None
) -> tuple[str, list[tuple[str, str]]]:
    """Return ``backend`` completed by ``sizes``, and (axis, message) of each contradiction.

    If ``backend`` is only an engine's name, the layout comes from ``sizes``, and data parallelism
    fills the rest of ``gpus``.
    """
    if not sizes:
        return backend, []
    if is_engine_only(backend):
        try:
            return str(_allocation(backend.strip(), sizes, gpus)), []
        except AllocationError as error:
            axis = next((name for name in ("etp", "ep", "cp", "pp", "tp") if name in sizes), "tp")
            return f"{backend.strip()}:d1", [(axis, str(error))]
    try:
        allocation = parse(backend)
    except AllocationError:
        return backend, []  # The check of allocation strings reports the error.
    return backend, list(_differences(allocation, sizes))


def _allocation(backend: str, sizes: dict[str, int], gpus: int | None) -> Allocation:
    full = dict.fromkeys(AXES, 1) | {axis: n for axis, n in sizes.items() if axis in AXES}
    copy = full["tp"] * full["pp"] * full["cp"]
    if gpus is not None:
        if gpus % copy:
            raise AllocationError(
                f"one copy of the model needs {copy} GPUs (tensor * pipeline * context), but "
                f"{copy} does not divide the {gpus} GPUs (cluster.hosts * cluster.workers_per_host)"
            )
        full["dp"] = gpus // copy
    experts = None
    if full["ep"] > 1 or "etp" in sizes:
        stage = full["dp"] * full["tp"] * full["cp"]
        tp = sizes.get("etp", full["tp"])
        if stage % (tp * full["ep"]):
            raise AllocationError(
                f"experts need {tp * full['ep']} ranks (expert tensor * expert), but this number "
                f"does not divide the {stage} ranks of a pipeline stage"
            )
        experts = ExpertSizes(stage // (tp * full["ep"]), tp, full["ep"])
    return Allocation(backend, sizes=full, experts=experts)


def _differences(allocation: Allocation, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
    stated = {**allocation.sizes, "etp": allocation.etp}
    letters = {"tp": "t", "pp": "p", "cp": "c", "ep": "e", "etp": "t of ffn"}
    for axis, size in sizes.items():
        if stated[axis] != size:
            yield (
                axis,
                f"{size} is not allowed: backend '{allocation}' has {letters[axis]} = "
                f"{stated[axis]}; the two must agree",
            )
