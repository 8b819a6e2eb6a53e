"""Whether the cluster has the hosts that a plan needs."""

from __future__ import annotations

from collections.abc import Sequence

from slurmrl.config.schema import Config
from slurmrl.errors import SchedulerError
from slurmrl.plan.model import Plan
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow

TIMEOUT_S = 10.0


def ask(config: Config) -> list[HostRow] | None:
    """The hosts that Slurm has in the configuration's partitions; None if it does not answer."""
    try:
        return SlurmClient(timeout_s=TIMEOUT_S).hosts(config.cluster.slurm.partition)
    except SchedulerError:
        return None


def lacking(plan: Plan, config: Config, hosts: Sequence[HostRow] | None) -> list[str]:
    """What the cluster could not provide even if all its hosts were idle."""
    if hosts is None:
        return []
    asks_gpus = config.cluster.slurm.gpu_directive != "none"
    where = f"partition {config.cluster.slurm.partition}" if config.cluster.slurm.partition else ""
    found = []
    for group in plan.groups:
        gpus = group.gpus_per_worker * group.workers_per_host if asks_gpus else 0
        fit = sum(host.gpus >= gpus for host in hosts)
        needed = 1 if group.elastic else group.hosts
        if fit < needed:
            kind = f"hosts with {gpus} GPUs" if gpus else "hosts"
            most = max((host.gpus for host in hosts), default=0)
            found.append(
                f"the {group.name} group needs {needed} {kind}, {where or 'the cluster'} has {fit} "
                f"(of {len(hosts)} hosts, with up to {most} GPUs): change the layout or "
                "cluster.workers_per_host"
            )
    return found
