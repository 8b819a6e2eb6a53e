"""What runs a worker's Python where workers live in a container. Their agent stays outside, where
Slurm and the shared directory are as on any host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from slurmrl.config.schema.cluster import Slurm

HANDED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
"""What a worker cannot do without, besides our own variables. Some containers (enroot, Apptainer
with --cleanenv) start with an environment of their own, so these are put on the command line, which
everybody can see: nothing secret may be among them."""


def interpreter(slurm: Slurm, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words of a worker's command up to Python itself; ``environ`` is the worker's."""
    if slurm.container is None:
        return (sys.executable,)
    given = [
        f"{name}={value}"
        for name, value in environ.items()
        if name in HANDED_ON or name.startswith("SLURMRL_")
    ]
    return (
        *shlex.split(slurm.container),
        "env",
        *sorted(given),
        slurm.container_python or sys.executable,
    )
