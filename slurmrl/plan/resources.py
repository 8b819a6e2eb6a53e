"""Cores and host memory that are requested for a worker with a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from slurmrl.config.schema import Cluster
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.scheduler.parse import HostRow

Hosts: TypeAlias = Mapping[str, Sequence[HostRow]]
"""Of the partitions of each group."""
CPUS: Final = 8
"""Cores of a worker with a GPU: the reward, tokenization, checkpoints and NCCL run beside it."""
SHARE_OF_MEMORY: Final = 0.9
"""Of a host's memory, what a default may request: Slurm may reserve some for itself."""
MEMORY_OPTIONS: Final = ("--mem", "--mem-per-cpu", "--mem-per-gpu")


def cpus(
    cluster: Cluster, workers_per_host: int, needed_hosts: int, hosts: Sequence[HostRow]
) -> int:
    """Cores of a worker: `CPUS`, or a GPU's share of the cores of its host where that is less."""
    if cluster.cpus_per_worker is not None:
        return cluster.cpus_per_worker
    shares = [_cpu_share(host, workers_per_host) for host in _best(hosts, needed_hosts)]
    return max(min([CPUS, *shares]), cluster.threads_per_worker)


def memory(
    cluster: Cluster,
    estimate: int | None,
    workers_per_host: int,
    needed_hosts: int,
    hosts: Sequence[HostRow],
) -> str | None:
    """Memory of a worker in Slurm's notation: the estimate, or what the hosts have if that is
    less. None: nothing is requested, because the estimate is unknown, the cluster does not know
    its hosts' memory, or ``extra_lines`` request memory."""
    if cluster.mem_per_worker is not None:
        return cluster.mem_per_worker
    chosen = _best(hosts, needed_hosts)
    unknown = any(not host.memory_mib for host in chosen)
    if estimate is None or unknown or _requests_memory(cluster):
        return None
    wanted = -(-estimate // GIB)
    least_mib = min((host.memory_mib for host in chosen), default=None)
    if least_mib is None or wanted * 1024 * workers_per_host <= least_mib * SHARE_OF_MEMORY:
        return f"{wanted}G"
    return f"{int(least_mib * SHARE_OF_MEMORY) // workers_per_host}M"


def _best(hosts: Sequence[HostRow], needed: int) -> list[HostRow]:
    """The hosts with the most cores and memory, as many as are needed; of ``hosts`` that have
    enough GPUs."""
    return sorted(hosts, key=lambda host: (host.cpus, host.memory_mib), reverse=True)[:needed]


def _cpu_share(host: HostRow, workers_per_host: int) -> int:
    """Cores for each of the host's GPUs, so that other jobs can use its other GPUs."""
    return host.cpus // max(host.gpus, workers_per_host) if host.cpus else CPUS


def _requests_memory(cluster: Cluster) -> bool:
    lines = [line.strip().removeprefix("#SBATCH").strip() for line in cluster.slurm.extra_lines]
    return any(line.replace("=", " ").split(" ")[0] in MEMORY_OPTIONS for line in lines)
