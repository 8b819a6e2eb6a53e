"""Defaults that depend on the kind of device: how many GPUs a worker has, and the precision."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from slurmrl.config.schema import Cluster, Config

FIRST_GPU: Final = Path("/dev/nvidia0")
ON_GPUS: Final = "bfloat16"
ON_CPUS: Final = "float32"
"""bfloat16 is slower than float32 on most CPUs."""


def gpus_per_worker(cluster: Cluster, scheduler: str) -> int:
    """GPUs of one worker. ``scheduler`` is ``"local"`` or ``"slurm"``."""
    if cluster.gpus_per_worker is not None:
        return cluster.gpus_per_worker
    return 1 if scheduler != "local" or FIRST_GPU.exists() else 0


def with_precision(config: Config, scheduler: str) -> Config:
    """The configuration with the actor's default precision, which the other roles inherit, if the
    actor sets none. (A resolved configuration sets all, so a trial keeps its precision.)"""
    if "dtype" in config.actor.model_fields_set:
        return config
    dtype = ON_GPUS if gpus_per_worker(config.cluster, scheduler) else ON_CPUS
    return config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": dtype})})
