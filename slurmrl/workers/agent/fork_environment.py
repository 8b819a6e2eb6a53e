"""The environment of a host's fork server and the command that starts its Python.

The workers inherit this environment. The command runs inside the container, if one is configured.
The agent runs outside, where Slurm's commands and the shared directory are available. Variables of
the submitter, of ``cluster.env`` and of set-up lines override the defaults. All functions are pure.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from slurmrl.config.schema.cluster import Slurm
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.scheduler.base import FABRIC_PREFIXES, NO_BYTECODE

SINGLE_THREADED: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables that keep numpy's OpenBLAS from starting threads on import. A fork server must have no
other threads, because a fork copies the locks of other threads, but not these threads."""
FLIGHT_RECORDER: Final = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables for torch's flight recorder, which explains hangs: record 2000 collectives (not every
version does so by default), and write no dumps. Agents collect the records instead. For dumps, a
thread of each rank would read the store once per second."""
ALLOCATOR: Final = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Variable that lets torch's allocator grow its segments, so that micro-batches of different
lengths do not fragment memory."""
OLDER_NAMES: Final = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}
"""Older names of variables, which torch also reads. If the user has set an old name, do not set the
new name, because torch may prefer the new name."""
BLACKWELL: Final = 10.0
"""Minimum compute capability of GPUs that start kernels of several streams in the order of calls,
whatever CUDA_DEVICE_MAX_CONNECTIONS is."""

HANDED_ON = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONPATH"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", NO_BYTECODE),
)
PREFIXES = (*FABRIC_PREFIXES, "PYTORCH_", "SLURMRL_")
"""Prefixes of variables that workers need in addition to ``cluster.env``. Some containers (enroot,
Apptainer with --cleanenv) do not inherit the environment, so `interpreter` passes these variables
on the command line. Every user of the host can read the command line: never add a secret."""


def defaults(plan: Plan, compute_capability: float | None) -> dict[str, str]:
    """Return the variables that depend on the plan's engines.

    With one connection, a GPU starts kernels in the order of their calls. Before Blackwell,
    megatron-core needs this order to overlap tensor-parallel communication with computation. FSDP
    must not have one connection: its all-gathers would not overlap with computation.
    """
    ordered = any(
        model.engine == "megatron" and model.sizes.get("tp", 1) > 1
        for model in plan.models.values()
    )
    older = compute_capability is None or compute_capability < BLACKWELL
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered and older else {}


def of_fork_server(
    group: GroupPlan, devices: Sequence[str], environ: Mapping[str, str], more: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a fork server. The server sees the ``devices`` of all its ranks.

    ``environ`` is the agent's environment. ``more`` are the variables from `defaults`.
    """
    visible = ",".join(filter(None, devices))
    ours = {**FLIGHT_RECORDER, **(ALLOCATOR if visible else {}), **more}
    return {
        **{name: ours[name] for name in ours if OLDER_NAMES.get(name, name) not in environ},
        **environ,
        **SINGLE_THREADED,
        "OMP_NUM_THREADS": str(group.threads_per_worker),
        **of_rank(visible),
    }


def of_rank(visible: str) -> dict[str, str]:
    """Return the variables of a rank, which its worker sets before it touches a GPU."""
    return {"CUDA_VISIBLE_DEVICES": visible}


def interpreter(
    slurm: Slurm, environ: Mapping[str, str], chosen: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the command that starts Python, inside the container if there is one.

    ``environ`` is the fork server's environment. ``chosen`` are the names in ``cluster.env``.
    """
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
