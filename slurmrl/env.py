"""Every environment variable that slurmrl reads, in one typed table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurmrl.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    name: str
    parse: Callable[[str], T]
    default: T
    doc: str

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The variable's value, or its default when it is unset or empty."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise UsageError(f"environment variable {self.name}={text!r}: {error}") from error


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)} is allowed")
        return text

    return parse


ROOT: Variable[str] = Variable("SLURMRL_ROOT", str, "", "Folder that holds all runs.")
LINK: Variable[int] = Variable(
    "SLURM_ARRAY_TASK_ID",
    int,
    0,
    "Index of this link in the chain (Slurm, or our local chain).",
)
JOB_ID: Variable[str] = Variable("SLURM_JOB_ID", str, "", "Id of this job (Slurm).")
ARRAY_JOB_ID: Variable[str] = Variable(
    "SLURM_ARRAY_JOB_ID", str, "", "Id of the job array (Slurm)."
)
RESTART_COUNT: Variable[int] = Variable(
    "SLURM_RESTART_COUNT", int, 0, "Requeues of this job (Slurm)."
)
ROUND: Variable[int] = Variable(
    "SLURMRL_ROUND", int, 0, "Starts of the agents inside this start of the job."
)
JOB_END: Variable[float | None] = Variable(
    "SLURMRL_JOB_END", float, None, "When this job reaches its time limit, by its first host."
)
SLURM_END_TIME: Variable[float | None] = Variable(
    "SLURM_JOB_END_TIME", float, None, "The same as newer versions of Slurm say it."
)
NODE_LIST: Variable[str] = Variable("SLURM_JOB_NODELIST", str, "", "Hosts of this job (Slurm).")
NODE_ID: Variable[int] = Variable(
    "SLURM_NODEID", int, 0, "Host index of this task in its job (Slurm)."
)
NODE_NAME: Variable[str] = Variable("SLURMD_NODENAME", str, "", "Slurm's name of this host.")
VISIBLE_DEVICES: Variable[str] = Variable(
    "CUDA_VISIBLE_DEVICES", str, "", "GPUs that the scheduler gave: indices, UUIDs or MIG ids."
)
OPS: Variable[str] = Variable(
    "SLURMRL_OPS",
    _one_of("auto", "torch", "native"),
    "auto",
    "Compiled operators: auto (where they help and can be had), torch (never), native (or fail).",
)
OPS_CACHE: Variable[str] = Variable(
    "SLURMRL_OPS_CACHE", str, "", "Folder of compiled operators; may be shared by hosts."
)
XDG_CACHE_HOME: Variable[str] = Variable(
    "XDG_CACHE_HOME", str, "", "The user's folder for caches; ~/.cache where unset."
)
CXX: Variable[str] = Variable("CXX", str, "c++", "C++ compiler that builds the operators.")
CUDA_HOME: Variable[str] = Variable(
    "CUDA_HOME", str, "", "Folder of the CUDA toolkit whose nvcc builds the operators."
)

VARIABLES: tuple[Variable[str] | Variable[int] | Variable[float | None], ...] = (
    ROOT,
    LINK,
    JOB_ID,
    ARRAY_JOB_ID,
    RESTART_COUNT,
    ROUND,
    JOB_END,
    SLURM_END_TIME,
    NODE_LIST,
    NODE_ID,
    NODE_NAME,
    VISIBLE_DEVICES,
    OPS,
    OPS_CACHE,
    XDG_CACHE_HOME,
    CXX,
    CUDA_HOME,
)
