"""Checks of rollout tasks, evaluations in separate trials, servers, and FP8.

Servers may be started by the run or already running. Nobody sees the messages when the run submits
a separate evaluation trial. The submission of the trained trial therefore reports the problems of
such evaluation trials.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from slurmrl.config.allocation import Allocation, parse
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.allocation.parser import format_gpus, parse_gpus
from slurmrl.config.schema import Config, evaluation_key
from slurmrl.config.schema.cluster import JobOptions
from slurmrl.config.schema.rollout import read_keys
from slurmrl.config.source import KeyPath, Source
from slurmrl.errors import AllocationError, Problem, UsageError
from slurmrl.plan.checks import Draft, fit
from slurmrl.plan.dataflow import REWARD_MODEL, Call, Method
from slurmrl.plan.engine_rules import SERVER_KINDS, is_flag, lacking, last_value, rules_of
from slurmrl.plan.estimates.server_types import ALIGNMENT, BLOCK, FP8_FAMILIES, unequal_sizes
from slurmrl.plan.estimates.shape import known_config, shape_of, text_config
from slurmrl.plan.metric_names import generates
from slurmrl.plan.placement import ROLLOUTS, tasks_inside, trainers
from slurmrl.plan.precision import DTYPE, SERVER_ARGS, generating
from slurmrl.run.paths import EVALUATED

OF_TRAINERS: Final = ("offload", "servers")
"""Settings that apply only if the trainers or running servers generate."""
OF_OURS: Final = ("python", "server_args", "quantization", "kv_cache_dtype")
"""Settings of ``rollout`` that only servers started by the run use."""
OF_RUNNING: Final = ("servers", "server_weights", "server_keys")
"""Settings that only already running servers use."""
OF_ALL: Final = ("server_start_s", "server_silence_s")
TASKS: Final = ("evaluation", "tasks")
LONGEST_SUITE: Final = 40
"""Maximum length of a suite's name. A trial's name also contains ``-step-123456789-``."""
LONGEST_EXPERIMENT: Final = 64 - len(EVALUATED)
MEASURED: Final = ("prompt", "prompt_answer", "messages")
"""Types of dataset on which the algorithm `evaluate` can measure any model."""


def tasks(draft: Draft) -> Iterator[Problem]:
    """Check that rollout tasks generate for training, and that their settings agree."""
    rollout, algorithm = draft.config.rollout, draft.algorithm
    settings = rollout.tasks
    if settings is None:
        if rollout.slurm != type(rollout.slurm)():
            reason = " without rollout.tasks, whose jobs it configures"
            yield draft.reject((ROLLOUTS, "slurm"), reason)
        return
    yield from _wrong_slurm(draft, rollout.slurm, (ROLLOUTS, "slurm"))
    calls = algorithm.calls(draft.config)
    generating = [call.name for call in calls if call.method is Method.GENERATE]
    if not generating or "actor" not in draft.trained:
        reason = f": {algorithm.name} does not train on completions"
        yield draft.reject((ROLLOUTS, "tasks"), reason)
    elif len(generating) > 1:
        reason = (
            f": {algorithm.name} generates {len(generating)} times in a step "
            f"({', '.join(generating)}), but rollout tasks generate once"
        )
        yield draft.reject((ROLLOUTS, "tasks"), reason)
    yield from _rejected(draft, OF_TRAINERS, " with rollout.tasks")
    publish = rollout.publish
    if publish is not None and publish.every_steps > settings.max_staleness + 1:
        reason = (
            f": weights are published every {publish.every_steps} steps "
            f"(rollout.publish.every_steps); must be at least {publish.every_steps - 1}"
        )
        yield draft.reject((ROLLOUTS, "tasks", "max_staleness"), reason, settings.max_staleness)
    yield from _inside(draft)
    allocation = draft.allocations().get(ROLLOUTS)
    if allocation is None:
        return
    copies = allocation.sizes["dp"]
    if settings.max is not None and copies not in (1, settings.max):
        reason = f": rollout.backend '{rollout.backend}' sets {copies} tasks; leave out one"
        yield draft.reject((ROLLOUTS, "tasks", "max"), reason, settings.max)
    if settings.min > (most := settings.max or copies):
        reason = f": at most {most} tasks run (rollout.tasks.max)"
        yield draft.reject((ROLLOUTS, "tasks", "min"), reason, settings.min)


def _inside(draft: Draft) -> Iterator[Problem]:
    """Check that tasks in the trainers' job use the GPUs that follow the GPUs of the models."""
    rollout, placed = draft.config.rollout, draft.placements()
    workers, (number, size) = trainers(placed.values()), tasks_inside(draft.config, placed)
    if not workers or not number:
        return
    try:
        listed = parse_gpus(rollout.gpus)
    except AllocationError:
        return  # Another check reports the error.
    behind = tuple(range(workers, workers + number * size))
    if len(listed) == len(behind) and listed != behind:
        reason = (
            f" with rollout.tasks: the trainers' models use GPUs {format_gpus(range(workers))} and "
            f"the tasks use the next GPUs; write {format_gpus(behind)}"
        )
        yield draft.reject((ROLLOUTS, "gpus"), reason, rollout.gpus)
    if rollout.slurm != type(rollout.slurm)():
        reason = " with rollout.gpus: the tasks run in the trainers' job"
        yield draft.reject((ROLLOUTS, "slurm"), reason)


def _wrong_slurm(draft: Draft, own: JobOptions, where: KeyPath) -> Iterator[Problem]:
    """Check that the options of a group agree with the trainers' options."""
    try:
        own.over(draft.config.cluster.slurm)
    except ValidationError as error:
        for details in error.errors():
            yield draft.problem(where, details["msg"].removeprefix("Value error, "))


def evaluation_tasks(draft: Draft) -> Iterator[Problem]:
    """Check that separate trials can evaluate the trained actor on the held-out data."""
    config, algorithm = draft.config, draft.algorithm
    settings = config.evaluation.tasks if config.evaluation is not None else None
    if settings is None:
        return
    if "actor" not in draft.trained:
        reason = f": {algorithm.name} does not train the actor, so no checkpoint can be evaluated"
        yield draft.reject(TASKS, reason)
    kinds = ("preference",) if algorithm.name == REWARD_MODEL else MEASURED
    for suite, own in config.evaluations.items():
        if own.held_out.kind not in kinds:
            reason = (
                f" with evaluation.tasks and {algorithm.name}; allowed: {', '.join(kinds)}. "
                "Without evaluation.tasks the trainers evaluate on this dataset"
            )
            where = (*evaluation_key(suite), "dataset", "type")
            yield draft.reject(where, reason, own.held_out.type)
        if len(suite) > LONGEST_SUITE:
            message = (
                f"with evaluation.tasks, the name of a suite has at most {LONGEST_SUITE} characters"
            )
            yield draft.problem(evaluation_key(suite), message)
    if len(config.experiment) > LONGEST_EXPERIMENT:
        message = (
            f"has at most {LONGEST_EXPERIMENT} characters with evaluation.tasks, which adds "
            f"'{EVALUATED}' for the experiment of the evaluations"
        )
        yield draft.problem(("experiment",), message)
    calls = [
        call for own in config.evaluations.values() for call in algorithm.evaluation_calls(own)
    ]
    if any(call.role == REWARD_MODEL for call in calls) and config.reward_model is None:
        message = "is required: the reward of an evaluation uses this model"
        yield draft.problem((REWARD_MODEL,), message)
    yield from _wrong_slurm(draft, settings.slurm, (*TASKS, "slurm"))
    yield from _layout_of_evaluations(draft, settings.backend, calls)


def _layout_of_evaluations(draft: Draft, text: str, calls: list[Call]) -> Iterator[Problem]:
    """Check the actor's layout in evaluation trials, where the actor may also generate."""
    own = draft.allocations().get("actor")
    if not text and own is None:
        return  # Another check reports the actor's invalid layout.
    where = (*TASKS, "backend")
    try:
        allocation = parse(text) if text else own
        assert allocation is not None, "see above"
        if reason := lacking(allocation.backend, "training"):
            yield draft.reject(where, f": this is the actor's layout, but {reason}", text)
            return
        rules_of(allocation)
    except AllocationError as error:
        yield draft.problem(where, str(error))
        return
    size, batch = allocation.sizes["dp"], draft.algorithm.batch_size
    if text and batch % size:
        reason = (
            f": algorithm.batch_size {batch} must be a multiple of its data-parallel size, {size}"
        )
        yield draft.reject(where, reason, text)
    model = draft.config.actor.model_copy(update={"model": None})
    wanted = fit.Fit(model, allocation, shape_of(model), None)
    for misfit in islice(fit.check(wanted) if text else (), 1):
        value = misfit.value or f"'{text}'"
        yield draft.problem(where, f"{value} is not allowed: {misfit.reason}")
    reason = lacking(allocation.backend, "generation")
    if reason and generates(calls) and not draft.config.evaluation_trials_roll_out:
        reason = f": the evaluation generates, and {reason}"
        yield draft.reject(where, reason, str(allocation))


def servers(draft: Draft) -> Iterator[Problem]:
    """Check the settings of servers, which are allowed only if servers generate."""
    rollout = draft.config.rollout
    allocation = draft.allocations().get(ROLLOUTS)
    backend = allocation.backend if allocation else ""
    if allocation is None or not BACKENDS[backend].serves:
        reason = f": only servers use this key (rollout.backend {' or '.join(SERVER_KINDS)})"
        yield from _rejected(draft, (*OF_RUNNING, *OF_OURS, *OF_ALL), reason)
        return
    if rollout.servers:
        yield from _running(draft, allocation)
    else:
        if (draft.source.values.get(ROLLOUTS) or {}).get("servers"):
            return  # Another check reports the invalid addresses.
        yield from _rejected(draft, OF_RUNNING, " without rollout.servers")
        yield from _own(draft, backend)
        yield from _flags(draft, backend)
    yield from _temperatures(draft, backend)
    shape, reason = shape_of(draft.config.actor), draft.lacks(ROLLOUTS, "dense_layers")
    if reason and shape is not None and shape.experts and shape.dense_layers:
        if text_config(known_config(draft.config.actor)).get("first_k_dense_replace"):
            return  # SGLang reads this field to find dense layers.
        layers = f"{shape.dense_layers} of {shape.layers} layers of this actor are dense"
        yield draft.reject((ROLLOUTS, "backend"), f": {layers}, and {reason}", str(allocation))


def _temperatures(draft: Draft, backend: str) -> Iterator[Problem]:
    """Check that servers can sample at the temperatures of training and evaluations."""
    config, least = draft.config, SERVER_KINDS[backend].least_temperature
    key: KeyPath = (ROLLOUTS, "temperature")
    if config.rollout.greedy and config.rollout.temperature != 1.0:
        reason = (
            f" with greedy and {backend}, which reports log-probabilities of greedy tokens at "
            "temperature 1"
        )
        yield draft.reject(key, reason, config.rollout.temperature)
    asked = {key: config.rollout.temperature}
    evaluates = config.rollout_evaluates or config.evaluation_trials_roll_out
    for suite, own in config.evaluations.items() if evaluates else ():
        assert own.evaluation is not None, "one of `evaluations`"
        if own.held_out.kind == "prompt" and not own.evaluation.greedy:
            asked[*evaluation_key(suite), "temperature"] = own.evaluation.temperature
    for key, temperature in asked.items():
        if temperature < least:
            reason = f" with {backend}; allowed: at least {least:g}"
            yield draft.reject(key, reason, temperature)


def _rejected(draft: Draft, fields: Iterable[str], reason: str) -> Iterator[Problem]:
    """Reject each of the fields whose value is not the default."""
    rollout = draft.config.rollout
    for field in fields:
        default = type(rollout).model_fields[field].get_default(call_default_factory=True)
        if getattr(rollout, field) != default:  # A resumed trial writes all defaults.
            yield draft.reject((ROLLOUTS, field), reason)


def _own(draft: Draft, backend: str) -> Iterator[Problem]:
    """Check that the run's own servers have GPUs or tasks, and a Python interpreter."""
    rollout = draft.config.rollout
    if not rollout.gpus.strip() and rollout.tasks is None:
        message = (
            f"is required with {backend}: the GPUs of the trainers' job that run servers (without "
            "GPUs: the workers). Or set rollout.tasks (one server per task) or "
            "rollout.servers (addresses of running servers)"
        )
        yield draft.problem((ROLLOUTS, "gpus"), message)
    if reason := _unusable(rollout.python, contained=bool(draft.config.cluster.slurm.container)):
        message = f"{reason}; set the Python of an environment in which {backend} is installed"
        yield draft.problem((ROLLOUTS, "python"), message)


def _unusable(python: str | None, *, contained: bool) -> str:
    """Return why an interpreter cannot be used. Do not check that it exists inside a container."""
    if python is None:
        return "is required"
    if not Path(python).is_absolute():
        return f"'{python}' is not allowed: not an absolute path"
    if not contained and not os.access(python, os.X_OK):
        return f"'{python}' is not allowed: there is no such program"
    return ""


def _running(draft: Draft, allocation: Allocation) -> Iterator[Problem]:
    """Check the settings of running servers: addresses, keys and the folder for weights."""
    rollout, backend = draft.config.rollout, allocation.backend
    reason = " with rollout.servers, because slurmrl does not start them"
    yield from _rejected(draft, OF_OURS, reason)
    if allocation.sizes["dp"] > 1:
        reason = (
            f" with rollout.servers, which have their own layouts: write {backend}, or for example "
            f"{backend}:t2 to gather the weights on 2 GPUs of the trainers"
        )
        yield draft.reject((ROLLOUTS, "backend"), reason, rollout.backend)
    if rollout.offload is not None:
        reason = " with rollout.servers: the run does not manage their memory"
        yield draft.reject((ROLLOUTS, "offload"), reason)
    twice = [address for address, count in Counter(rollout.servers).items() if count > 1]
    if twice:
        message = f"{', '.join(twice)} is listed more than once"
        yield draft.problem((ROLLOUTS, "servers"), message)
    if rollout.server_keys is not None:
        try:
            read_keys(Path(rollout.server_keys))
        except UsageError as error:
            yield draft.problem((ROLLOUTS, "server_keys"), str(error))
    folder = rollout.server_weights
    if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        reason = ": this folder does not exist or cannot be written to"
        yield draft.reject((ROLLOUTS, "server_weights"), reason, folder)


def _flags(draft: Draft, backend: str) -> Iterator[Problem]:
    """Yield server arguments that make a server unreachable or contradict the plan."""
    rollout, rules = draft.config.rollout, SERVER_KINDS[backend]
    flags = dict(rules.conflicts)
    if rollout.replay_experts:
        flags = {**rules.experts_conflicts, **flags}
    if rollout.tasks is not None and rollout.tasks.stale_cache:
        flags = {**rules.stale_cache_conflicts, **flags}
    if any(each.media_keys for each in draft.config.datasets().values()):
        flags = {**rules.image_conflicts, **flags}
    for argument in rollout.server_args:
        word = argument.partition("=")[0]
        reason = next((flags[flag] for flag in flags if is_flag(word, flag)), None)
        if reason is not None:
            yield draft.reject((ROLLOUTS, "server_args"), f": {reason}", argument)


FLAGS: Final = {
    "quantization": ("--quantization", "-q", "--quantization-config"),
    "kv_cache_dtype": ("--kv-cache-dtype",),
}
"""Flags in ``rollout.server_args`` that conflict with a setting of ``rollout``."""
ONLINE: Final = "--quantization"
COMPUTES: Final = ("bfloat16", "float16")


def fp8(draft: Draft) -> Iterator[Problem]:
    """Check that the run's own servers can compute with FP8 matrices of this actor."""
    rollout = draft.config.rollout
    allocation = draft.allocations().get(ROLLOUTS)
    if allocation is None or not BACKENDS[allocation.backend].serves or rollout.servers:
        return  # Another check rejects FP8 without servers.
    yield from _twice(draft)
    if rollout.quantization is None:
        if allocation.backend == "sglang":
            yield from _online(draft)
        return
    key = (ROLLOUTS, "quantization")
    value, actor = rollout.quantization, draft.config.actor
    if allocation.backend != "vllm":
        reason = f" with {allocation.backend}, which misread FP8 versions in a test; allowed: vllm"
        yield draft.reject(key, reason, value)
        return
    if rollout.kv_cache_dtype is not None:
        reason = " with rollout.quantization: random initial weights would set the cache's scales"
        yield draft.reject((ROLLOUTS, "kv_cache_dtype"), reason, rollout.kv_cache_dtype)
    # The dtype is float32 by default only without GPUs, and another check rejects FP8 there.
    given, found = last_value(rollout.server_args, DTYPE) is not None, generating(draft.config)
    if found.dtype not in COMPUTES and (given or draft.writes("actor", "dtype")):
        source = f"{SERVER_ARGS} {DTYPE[0]}" if given else "actor.dtype"
        computes = f"in bfloat16 around FP8 matrices, not in {found.dtype} ({source})"
        yield draft.reject(key, f": a server computes {computes}", value)
    if not (values := known_config(actor)):
        return
    if (family := values.get("model_type")) not in FP8_FAMILIES:
        reason = f" with {family}; allowed families: {', '.join(FP8_FAMILIES)}"
        yield draft.reject(key, reason, value)
        return
    if (shape := shape_of(actor)) is None:
        return
    for name, size in unequal_sizes(shape, allocation.sizes["tp"], BLOCK):
        reason = (
            f" with '{allocation}': {name} is {size:g}, must be a multiple of {BLOCK}, because "
            f"blocks of {BLOCK} x {BLOCK} elements share a scale"
        )
        yield draft.reject(key, reason, value)
        return


def fp8_training(draft: Draft) -> Iterator[Problem]:
    """Check that TransformerEngine can compute the matrices of each role in FP8."""
    told: set[tuple[str, str]] = set()
    for role, model in draft.models():
        allocation = draft.allocations().get(role)
        if model.fp8 is None or allocation is None or draft.lacks(role, "fp8"):
            continue  # Another check rejects other engines.
        shape, where = shape_of(model), role if draft.writes(role, "fp8") else "actor"
        reason = ""
        if model.transformer_engine is False:
            reason = " with transformer_engine: false: only TransformerEngine computes in FP8"
        elif model.dtype != "bfloat16":
            reason = f" with dtype {model.dtype}: the rest of the model computes in bfloat16"
        elif shape is not None and (shape.experts or shape.latent is not None):
            kind = "experts" if shape.experts else "latent attention"
            whose = "actor" if shape == shape_of(draft.config.actor) else role
            reason = f": the {whose} has {kind}, and FP8 is for dense layers only"
        elif shape is not None:
            for name, size in unequal_sizes(shape, allocation.sizes["tp"], ALIGNMENT):
                wrong = f"{name} is {size:g}, must be a multiple of {ALIGNMENT}"
                reason = f" with '{allocation}': {wrong}"
        if reason and (where, reason) not in told:
            told.add((where, reason))  # Several roles may inherit the setting.
            yield draft.reject((where, "fp8"), reason, model.fp8)


def _twice(draft: Draft) -> Iterator[Problem]:
    """Check that arguments of servers do not repeat a setting of the precision."""
    rollout = draft.config.rollout
    for name, flags in FLAGS.items():
        if getattr(rollout, name) is None:
            continue
        if last_value(rollout.server_args, flags) is not None:
            reason = f"{flags[0]} with rollout.{name}, which also sets the server's precision"
            yield draft.problem((ROLLOUTS, "server_args"), f"must not have {reason}")


def _online(draft: Draft) -> Iterator[Problem]:
    """Check that SGLang does not quantize weights, because it could not load new weights."""
    if last_value(draft.config.rollout.server_args, (ONLINE,)) is not None:
        message = (
            f"must not have {ONLINE}: SGLang cannot load new weights after it has quantized "
            "weights; use vllm with rollout.quantization: fp8"
        )
        yield draft.problem((ROLLOUTS, "server_args"), message)


def fp8_without_gpus(config: Config, source: Source, cause: str) -> Iterator[Problem]:
    """Yield a problem for each FP8 setting, which servers without GPUs do not support.

    ``cause`` is the reason why the workers that generate have no GPUs.
    """
    for name in FLAGS:
        if (value := getattr(config.rollout, name)) is not None:
            message = f"'{value}' is not allowed: servers compute in FP8 on GPUs only, and {cause}"
            yield source.problem((ROLLOUTS, name), message)
