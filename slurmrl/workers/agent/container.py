"""The command that runs a worker's Python, inside a container if one is configured.

The agent stays outside of the container, where it has Slurm and the shared directory.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from slurmrl.config.schema.cluster import Slurm

HANDED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH")
"""Variables that a worker needs besides our own. Some containers (enroot, Apptainer with
--cleanenv) do not inherit the environment, so these go on the command line, which every user of the
host can read: never add anything secret."""


def interpreter(slurm: Slurm, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a worker's command up to and including Python. ``environ`` is the worker's."""
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
