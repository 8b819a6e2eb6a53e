"""From settings to the plan of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from slurmrl.allocation import parse
from slurmrl.config.schema import Config
from slurmrl.graph.call import Call
from slurmrl.graph.dataset import DATASET_KEYS
from slurmrl.graph.graph import Graph
from slurmrl.graph.roles import RoleUse
from slurmrl.plan.model import CallPlan, GroupPlan, ModelPlan, Plan
from slurmrl.plan.settings import Settings

LARGEST_HOST: Final = 8
"""Workers that are put on one host where the user does not say."""
FIRST_GPU: Final = Path("/dev/nvidia0")


def make_plan(settings: Settings, *, scheduler: str) -> Plan:
    """The plan for ``scheduler``, ``"local"`` or ``"slurm"``."""
    config, algorithm = settings.config, settings.algorithm
    models = {use.role: _model(config, use) for use in algorithm.roles()}
    group = _group(config, max(len(model.ranks) for model in models.values()), scheduler)
    calls = Graph(algorithm.calls(config), DATASET_KEYS[config.dataset.type]).order
    evaluation_calls: Sequence[Call] = ()
    if config.evaluation is not None:
        keys = DATASET_KEYS[config.evaluation.dataset.type]
        evaluation_calls = Graph(algorithm.evaluation_calls(config), keys).order
    return Plan(
        experiment=config.experiment,
        trial=config.trial,
        groups=(group,),
        models=models,
        calls=tuple(_call(call, models) for call in calls),
        evaluation_calls=tuple(_call(call, models) for call in evaluation_calls),
    )


def _model(config: Config, use: RoleUse) -> ModelPlan:
    allocation = parse(getattr(config, use.role).backend)
    return ModelPlan(
        role=use.role,
        backend=str(allocation),
        engine=allocation.backend,
        sizes=dict(allocation.sizes),
        ranks=tuple(range(allocation.world_size)),
        trained=use.trained,
        head=use.head,
    )


def _group(config: Config, workers: int, scheduler: str) -> GroupPlan:
    cluster = config.cluster
    per_host = workers
    if scheduler != "local":
        per_host = cluster.workers_per_host or min(workers, LARGEST_HOST)
    gpus = cluster.gpus_per_worker
    if gpus is None:
        gpus = 1 if scheduler != "local" or FIRST_GPU.exists() else 0
    return GroupPlan(
        hosts=-(-workers // per_host),
        workers_per_host=per_host,
        gpus_per_worker=gpus,
        threads_per_worker=cluster.threads_per_worker,
        cpus_per_worker=cluster.cpus_per_worker or cluster.threads_per_worker,
        links=cluster.slurm.links,
    )


def _call(call: Call, models: dict[str, ModelPlan]) -> CallPlan:
    """A call without a model runs where the actor does."""
    return CallPlan(
        name=call.name,
        role=call.role,
        method=call.method,
        interface=call.interface,
        inputs=call.inputs,
        outputs=call.outputs,
        ranks=models[call.role or "actor"].ranks,
    )
