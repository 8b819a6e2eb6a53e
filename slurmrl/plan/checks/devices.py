"""Whether engines have the devices that they need."""

from __future__ import annotations

from slurmrl.config.schema import role_key
from slurmrl.errors import Problem
from slurmrl.plan.engines import ENGINES
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.settings import Settings


def lacking_gpus(settings: Settings, plan: Plan) -> list[Problem]:
    """Return a problem for each layout of an engine that needs GPUs where workers have none."""
    gpus = {group.name: group.gpus_per_worker for group in plan.groups}
    cause = "cluster.gpus_per_worker is 0"
    if settings.config.cluster.gpus_per_worker is None:
        cause = "this machine, where the trial would run, has none"
    found: dict[str, Problem] = {}
    for model in plan.models.values():
        if not ENGINES[model.engine].needs_gpu or gpus[model.group] or model.backend in found:
            continue
        message = (
            f"'{model.backend}' is not allowed: the {model.engine} engine needs a GPU for each "
            f"worker, and {cause}; on CPUs use fsdp"
        )
        section = (ROLLOUTS,) if model.role == ROLLOUTS else role_key(model.role)
        found[model.backend] = settings.source.problem((*section, "backend"), message)
    return list(found.values())
