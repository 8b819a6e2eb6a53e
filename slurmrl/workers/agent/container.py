"""The command that runs the Python of a fork server, inside a container if one is configured.

The agent stays outside of the container, where it has Slurm and the shared directory.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping

from slurmrl.config.schema.cluster import Slurm
from slurmrl.scheduler.environment import NO_BYTECODE, OF_FABRIC

HANDED_ON = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONPATH"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", NO_BYTECODE),
)
PREFIXES = (*OF_FABRIC, "PYTORCH_", "SLURMRL_")
"""Variables that workers need in addition to those of ``cluster.env``. Some containers (enroot,
Apptainer with --cleanenv) do not inherit the environment, so these go on the command line, which
every user of the host can read: never add anything secret."""


def interpreter(
    slurm: Slurm, environ: Mapping[str, str], chosen: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the command up to and including Python. ``environ`` is the fork server's, ``chosen``
    are the names in ``cluster.env``."""
    if slurm.container is None:
        return (sys.executable,)
    given = [
        f"{name}={value}"
        for name, value in environ.items()
        if name in HANDED_ON or name in chosen or name.startswith(PREFIXES)
    ]
    return (
        *shlex.split(slurm.container),
        "env",
        *sorted(given),
        slurm.container_python or sys.executable,
    )
