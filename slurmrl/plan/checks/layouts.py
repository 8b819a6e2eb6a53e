"""Checks of the layouts: strings, GPUs, hosts, batches and architectures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from slurmrl.config.allocation import parse
from slurmrl.config.allocation.allocation import ARCHON, BACKENDS
from slurmrl.config.allocation.parser import format_gpus
from slurmrl.config.schema import Model, evaluation_key
from slurmrl.config.source import KeyPath
from slurmrl.errors import AllocationError, Problem
from slurmrl.plan import inherited_settings, placement
from slurmrl.plan.algorithms import all_calls
from slurmrl.plan.checks import Draft, fit
from slurmrl.plan.engine_rules import lacking, rules_of
from slurmrl.plan.estimates.shape import lengths_of, shape_of
from slurmrl.plan.metric_names import generates
from slurmrl.plan.placement import LARGEST_HOST, ROLLOUTS, Placement
from slurmrl.run.reports import TRAINERS


def backends(draft: Draft) -> Iterator[Problem]:
    """Check the backend strings. Report an inherited string once, where the user wrote it."""
    for role, text in _written(draft):
        try:
            allocation = parse(text)
        except AllocationError as error:
            yield draft.problem((role, "backend"), str(error))
            continue
        needed = "rollouts" if role == ROLLOUTS else "training"
        if reason := lacking(allocation.backend, needed):
            yield draft.reject((role, "backend"), f": {reason}", text)


def _written(draft: Draft) -> Iterator[tuple[str, str]]:
    for role, model in draft.models():
        if role == "actor" or draft.writes(role, "backend"):
            yield role, model.backend
    if draft.config.rollout.backend:
        yield ROLLOUTS, draft.config.rollout.backend


def spellings(draft: Draft) -> Iterator[str]:
    """Yield notes on the engines that run layouts of ``archon``."""
    for role, text in _written(draft):
        with suppress(AllocationError):  # The check of allocation strings reports the error.
            allocation = parse(text)
            if not text.strip().startswith(ARCHON):
                continue
            reason = "" if allocation.backend == "fsdp" else ", because of p, e or an expert layout"
            yield f"{role}.backend: '{text}' runs as {allocation}{reason}"


def runnable(draft: Draft) -> Iterator[Problem]:
    """Check that the engines of this version can run the layouts."""
    for role, text in _written(draft):
        try:
            allocation = parse(text)
        except AllocationError:
            continue  # The check of allocation strings reports the error.
        try:
            rules_of(allocation)
        except AllocationError as error:
            yield draft.problem((role, "backend"), str(error))


def generation(draft: Draft) -> Iterator[Problem]:
    """Check that the actor's engine or ``rollout.backend`` can generate if a call generates."""
    allocation = draft.allocations().get("actor")
    config, algorithm = draft.config, draft.algorithm
    generating = generates([*all_calls(config, algorithm)])
    if config.rollout.tasks is not None:
        generating = config.trainers_evaluate  # Rollout tasks generate for training.
    elif config.rollout.backend:
        if not generating:
            reason = ": no call of this trial generates"
            yield draft.reject((ROLLOUTS, "backend"), reason, config.rollout.backend)
        return
    if not generating or allocation is None:
        return
    if reason := draft.lacks("actor", "generation"):
        cause = "the actor generates"
        remedy = f"set rollout.backend, for example to native:d{allocation.world_size}"
        if config.rollout.tasks is not None:
            cause = (
                "the trainers generate for `evaluation`, because rollout.tasks only serve training"
            )
            remedy = "evaluate in separate trials with evaluation.tasks={backend: fsdp:d1}"
            if draft.writes("evaluation", "every_steps"):
                remedy += " in place of evaluation.every_steps"
        text = f": {cause}, and {reason}; or {remedy}"
        yield draft.reject(("actor", "backend"), text, str(allocation))


def gpus(draft: Draft) -> Iterator[Problem]:
    """Check that lists of GPUs are valid, and that every GPU of the trainers' job holds a model."""
    sections = dict(draft.models()) | {ROLLOUTS: draft.config.rollout}
    for role, section in sections.items():
        if not draft.writes(role, "gpus") or not section.backend:
            continue
        try:
            parse(section.backend)
        except AllocationError:
            continue
        try:
            placement.place(section.backend, section.gpus)
        except AllocationError as error:
            yield draft.problem((role, "gpus"), str(error))
    for field in () if draft.config.rollout.backend else ("gpus", "offload"):
        if draft.writes(ROLLOUTS, field):
            yield draft.reject((ROLLOUTS, field), " without rollout.backend")
    placed = [place for place in draft.placements().values() if place.group == TRAINERS]
    used = {rank for place in placed for rank in place.ranks}
    empty = sorted(set(range(placement.trainers(placed))) - used)
    if empty:
        spans = format_gpus(empty)
        message = f"GPUs {spans} of the trial hold no model; number GPUs from 0 without gaps"
        yield draft.problem(_list_beyond(draft, empty[0]), message)


def _list_beyond(draft: Draft, gpu: int) -> KeyPath:
    """Return the key by which the user placed a model on a GPU whose number exceeds ``gpu``."""
    for role, place in draft.placements().items():
        if draft.writes(role, "gpus") and place.group == TRAINERS and max(place.ranks) > gpu:
            return (role, "gpus")
    return ("allocation_mode",) if draft.writes("allocation_mode") else ("actor", "gpus")


def batches(draft: Draft) -> Iterator[Problem]:
    """Check that all data-parallel ranks get equally many items, and at least one."""
    reported = set()
    for role, placed in draft.placements().items():
        size = placed.allocation.sizes["dp"]
        if size in reported or placed.group != TRAINERS:
            continue  # Separate servers handle requests one by one.
        reported.add(size)
        if draft.algorithm.batch_size % size:
            reason = (
                f": must be a multiple of {size}, the data-parallel size of {role}.backend "
                f"'{placed.allocation}'"
            )
            yield draft.reject(("algorithm", "batch_size"), reason, draft.algorithm.batch_size)
    used = [draft.placements().get(role) for role in ("actor", ROLLOUTS)]
    size = max((p.allocation.sizes["dp"] for p in used if p and p.group == TRAINERS), default=1)
    for suite, own in draft.config.evaluations.items() if draft.config.trainers_evaluate else ():
        samples = own.evaluation.samples if own.evaluation is not None else None
        if samples is not None and samples < size:
            reason = f": must be at least {size}, one for each rank"
            yield draft.reject((*evaluation_key(suite), "samples"), reason, samples)


def hosts(draft: Draft) -> Iterator[Problem]:
    """Check that workers fill their hosts, and that there are enough hosts.

    The local scheduler ignores the settings of hosts, because it has a single host.
    """
    cluster = draft.config.cluster
    placed = draft.placements()
    if "actor" not in placed:
        return
    try:
        needed, per_host, _ = placement.hosts_of_trainers(draft.config, placed)
    except AllocationError as error:
        given = cluster.workers_per_host is not None
        key = ("cluster", "workers_per_host") if given else (ROLLOUTS, "gpus")
        yield draft.problem(key, str(error))
        return
    if cluster.hosts is not None and needed > cluster.hosts:
        reason = (
            f": the {needed * per_host} workers of actor.backend '{placed['actor'].allocation}' "
            f"and the other models need {needed} hosts with {per_host} each"
        )
        yield draft.reject(("cluster", "hosts"), reason, cluster.hosts)


def rollout_instances(draft: Draft) -> Iterator[Problem]:
    """Check that one copy of a serving engine fits on a host."""
    servers = draft.placements().get(ROLLOUTS)
    if servers is None or not BACKENDS[servers.allocation.backend].serves:
        return
    if servers.group == TRAINERS:
        yield from _copies_over_hosts(draft, servers)
        return
    largest = draft.config.cluster.workers_per_host or LARGEST_HOST
    needed = servers.allocation.instance_size
    if needed > largest:
        reason = f": one copy needs {needed} GPUs (t*p), but a host has {largest}"
        yield draft.reject((ROLLOUTS, "backend"), reason, str(servers.allocation))


def _copies_over_hosts(draft: Draft, servers: Placement) -> Iterator[Problem]:
    """Check that the GPUs of each server in the trainers' job are on one host.

    Skip running servers, for which these GPUs only gather the weights.
    """
    placed, size = draft.placements(), servers.allocation.instance_size
    per_host = draft.config.cluster.workers_per_host or placement.workers_per_host(
        placement.trainers(placed.values()), placement.tensor_sizes(placed)
    )
    copies = [servers.ranks[first : first + size] for first in range(0, len(servers.ranks), size)]
    for copy in copies if not draft.config.rollout.servers else ():
        if len({rank // per_host for rank in copy}) > 1:
            reason = (
                f": one server has GPUs {format_gpus(sorted(copy))}, which are on several hosts "
                f"with {per_host} GPUs each"
            )
            yield draft.reject((ROLLOUTS, "gpus"), reason, str(servers.allocation))
            return


def architectures(draft: Draft) -> Iterator[Problem]:
    """Check that the sizes of layouts fit the architectures.

    A role that inherits layout and weights has the actor's problems. Report these once.
    """
    placed = draft.placements()
    minibatches = draft.algorithm.minibatches
    actor = draft.config.actor
    for role, place in placed.items():
        model = _model_on(draft, role)
        source = "actor" if role == ROLLOUTS else role
        same = (model.path, model.architecture) == (actor.path, actor.architecture)
        writes_layout = draft.writes(role, "backend") or draft.writes(role, "model")
        if source != "actor" and same and not writes_layout:
            continue
        shape = shape_of(model)
        lengths = lengths_of(draft.config, draft.algorithm, shape)
        steps = minibatches if role in draft.trained else 0
        for misfit in fit.check(fit.Fit(model, place.allocation, shape, lengths, steps)):
            if role == ROLLOUTS and misfit.axis not in inherited_settings.FIELDS:
                continue
            text = _rejection(misfit, place)
            if model.backend.strip().startswith(ARCHON) and role != ROLLOUTS:
                text = f"{text} ('{model.backend}' runs as {place.allocation})"
            yield draft.problem(_key(draft, role, misfit.axis), text)


def _model_on(draft: Draft, role: str) -> Model:
    """Return the model of a role; generation has the actor's model without its layout."""
    if role != ROLLOUTS:
        return draft.config.model(role)
    return draft.config.actor.model_copy(update={"model": None})


def _rejection(misfit: fit.Misfit, placed: Placement) -> str:
    if misfit.axis == "length":
        return misfit.reason
    value = misfit.value or f"'{placed.allocation}'"
    return f"{value} is not allowed: {misfit.reason}"


def _key(draft: Draft, role: str, axis: str) -> KeyPath:
    """Return the key by which the user set a size that does not fit."""
    if axis == "length":
        prompts = draft.config.dataset.kind == "prompt"
        return ("rollout", "max_new_tokens") if prompts else ("dataset", "max_tokens")
    field = inherited_settings.FIELDS.get(axis, axis)
    if role != ROLLOUTS and draft.writes(role, "model", field):
        return (role, "model", field)
    if role != ROLLOUTS and axis not in (*inherited_settings.FIELDS, "dp"):
        return (role, "model", field)
    return (role, "backend")
