"""Checks of the servers that generate: the run's own, and those that run already."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import evaluation_key
from slurmrl.config.servers import read_keys
from slurmrl.config.source import KeyPath
from slurmrl.errors import Problem, UsageError
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.engine_rules import ENGINES, SERVER_KINDS
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.placement import ROLLOUTS

OF_OURS: Final = ("python", "server_args")
"""Settings of ``rollout`` that only servers of the run's own use."""
OF_RUNNING: Final = ("servers", "server_weights", "server_keys")
"""Those that only running ones use."""
OF_ALL: Final = ("server_start_s", "server_silence_s")
SHORTEST_FLAG: Final = len("--tp")
"""argparse also accepts a flag by its beginning."""


def servers(draft: Draft) -> Iterator[Problem]:
    """What servers need is there, and only they have settings of servers."""
    rollout = draft.config.rollout
    allocation = draft.allocations().get(ROLLOUTS)
    backend = allocation.backend if allocation else ""
    if allocation is None or not BACKENDS[backend].serves:
        able = " or ".join(name for name in ENGINES if BACKENDS[name].serves)
        message = f"is not allowed: it is for servers (rollout.backend {able})"
        yield from _refused(draft, (*OF_RUNNING, *OF_OURS, *OF_ALL), message)
        return
    if backend not in ENGINES:
        return  # already reported
    if rollout.servers:
        yield from _running(draft, allocation)
    else:
        if (draft.source.values.get(ROLLOUTS) or {}).get("servers"):
            return  # addresses that are not valid, which are reported
        message = "is not allowed without rollout.servers"
        yield from _refused(draft, OF_RUNNING, message)
        yield from _own(draft, backend)
        yield from _flags(draft, backend)
    yield from _dense_layers(draft, backend)
    if rollout.greedy and rollout.temperature != 1.0:
        message = (
            f"{rollout.temperature:g} is not allowed with greedy and {backend}: its "
            "log-probabilities of greedy tokens are those at temperature 1"
        )
        yield draft.problem((ROLLOUTS, "temperature"), message)
    yield from _temperatures(draft, backend)


def _temperatures(draft: Draft, backend: str) -> Iterator[Problem]:
    """Servers draw at the temperatures that training and evaluations ask for."""
    config, least = draft.config, SERVER_KINDS[backend].least_temperature
    asked: dict[KeyPath, float] = {(ROLLOUTS, "temperature"): config.rollout.temperature}
    evaluates = config.rollout_evaluates or config.evaluation_trials_roll_out
    for suite, own in config.evaluations.items() if evaluates else ():
        assert own.evaluation is not None, "one of `evaluations`"
        if own.held_out.kind == "prompt" and not own.evaluation.greedy:
            asked[*evaluation_key(suite), "temperature"] = own.evaluation.temperature
    for key, temperature in asked.items():
        if temperature < least:
            message = (
                f"{temperature:g} is not allowed with {backend}, which draws at another "
                f"temperature then; at least {least:g}"
            )
            yield draft.problem(key, message)


def _dense_layers(draft: Draft, backend: str) -> Iterator[Problem]:
    """SGLang reads a model with experts and dense layers without a word, as another one."""
    shape = shape_of(draft.config.actor)
    if shape is None or ENGINES[backend].dense_layers:
        return
    if shape.experts and shape.dense_layers:
        message = (
            f"{backend} is not allowed with this actor, of which {shape.dense_layers} of "
            f"{shape.layers} layers are dense: it gives every layer experts, with weights that the "
            "actor does not have"
        )
        yield draft.problem((ROLLOUTS, "backend"), message)


def _refused(draft: Draft, fields: Iterable[str], message: str) -> Iterator[Problem]:
    """Those of the fields that are set."""
    rollout = draft.config.rollout
    for field in fields:
        default = type(rollout).model_fields[field].get_default(call_default_factory=True)
        if getattr(rollout, field) != default:  # (a resumed trial states its defaults)
            yield draft.problem((ROLLOUTS, field), message)


def _own(draft: Draft, backend: str) -> Iterator[Problem]:
    """Servers that the run starts need a place and a Python."""
    rollout = draft.config.rollout
    if not rollout.gpus.strip() and rollout.tasks is None:
        message = (
            f"is required with {backend}: the GPUs of the trainers' job (workers, if there are no "
            "GPUs) that have a server. Or set rollout.tasks, and each task has one, or "
            "rollout.servers to the addresses of running ones"
        )
        yield draft.problem((ROLLOUTS, "gpus"), message)
    if reason := _unusable(rollout.python, contained=bool(draft.config.cluster.slurm.container)):
        message = f"{reason}; set the Python of an environment in which {backend} is installed"
        yield draft.problem((ROLLOUTS, "python"), message)
    shape, on_cpus = shape_of(draft.config.actor), draft.config.cluster.gpus_per_worker == 0
    if backend == "vllm" and on_cpus and shape is not None and shape.tied:
        message = (
            "vllm is not allowed on CPUs with this actor, whose embeddings are tied "
            "(tie_word_embeddings): it would go on with the first vocabulary projection after "
            "updates; use native or sglang"
        )
        yield draft.problem((ROLLOUTS, "backend"), message)


def _running(draft: Draft, allocation: Allocation) -> Iterator[Problem]:
    """Running servers are addresses and, if need be, keys and a folder for weights."""
    rollout, backend = draft.config.rollout, allocation.backend
    message = "is not allowed with rollout.servers, which slurmrl does not start"
    yield from _refused(draft, OF_OURS, message)
    if allocation.sizes["dp"] > 1:
        message = (
            f"'{rollout.backend}' is not allowed with rollout.servers, which have their own "
            f"layouts: write {backend}, or for example {backend}:t2 to gather the weights on 2 "
            "GPUs of the trainers"
        )
        yield draft.problem((ROLLOUTS, "backend"), message)
    if rollout.offload is not None:
        message = "is not allowed with rollout.servers: their memory is not the run's"
        yield draft.problem((ROLLOUTS, "offload"), message)
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
        message = f"'{folder}' is not allowed: there is no such folder, or it cannot be written to"
        yield draft.problem((ROLLOUTS, "server_weights"), message)


def _flags(draft: Draft, backend: str) -> Iterator[Problem]:
    """Arguments with which a server cannot be reached, or is another one than the plan's."""
    rollout = draft.config.rollout
    rules = SERVER_KINDS[backend]
    flags = rules.conflicts
    if rollout.replay_experts:
        flags = {**rules.experts_conflicts, **flags}
    if rollout.tasks is not None and rollout.tasks.stale_cache:
        flags = {**rules.stale_cache_conflicts, **flags}
    for argument in rollout.server_args:
        flag = argument.partition("=")[0].replace("_", "-")
        for refused, reason in flags.items():
            if flag == refused or (
                len(flag) >= SHORTEST_FLAG and flag.startswith("--") and refused.startswith(flag)
            ):
                message = f"'{argument}' is not allowed: {reason}"
                yield draft.problem((ROLLOUTS, "server_args"), message)
                break


def _unusable(python: str | None, *, contained: bool) -> str:
    """Why an interpreter cannot be used. One inside a container cannot be seen from here."""
    if python is None:
        return "is required"
    if not Path(python).is_absolute():
        return f"'{python}' is not allowed: not an absolute path"
    if not contained and not os.access(python, os.X_OK):
        return f"'{python}' is not allowed: there is no such program"
    return ""
