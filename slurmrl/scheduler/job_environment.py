"""The environment variables that jobs and Slurm's commands get. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EXPORTED = ("HOME", "USER", "LANG", "PATH", "LD_LIBRARY_PATH")
"""Variables that a job inherits. Everything else comes from set-up lines, so that no token of the
login shell ends up in a job's environment.

Slurm's own ``--export=HOME,USER,…`` does not do that: it makes each start of a job run the user's
login shell on the compute node (1.2 s on the test bed) and adds whatever that exports. So sbatch
runs in this environment, and the script uses ``--export=ALL``."""

OF_FABRIC = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_")
"""Prefixes of other variables that a job inherits: settings of NCCL, which hold no secrets. Other
launchers pass them on, too."""

LOCAL = (*EXPORTED, "CUDA_VISIBLE_DEVICES", "TMPDIR")
"""The same for a link of the local scheduler; on a compute node Slurm sets the rest."""

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Set where Python runs a snapshot: the snapshot stays as it was submitted, and hosts that start
together do not all write the same files to a shared directory. A snapshot has the bytecode of this
package; a process compiles only the user's own modules at its start."""

OPTION_PREFIXES = ("SBATCH_", "SCANCEL_", "SLURM_", "SQUEUE_")
"""Variables that change options of Slurm's commands, or belong to the job in which we may run."""


def of_job(
    environ: Mapping[str, str], inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for sbatch, which passes all of it to the job.

    ``inherited``: variables of an earlier job, which set-up lines may have changed in ``environ``.
    """
    return _chosen(environ, ("SLURM_CONF",)) | inheritance(inherited or environ)


def inheritance(environ: Mapping[str, str]) -> dict[str, str]:
    return _chosen(environ, EXPORTED)


def of_snapshot(code: Path) -> dict[str, str]:
    """Return the variables of a process that runs the snapshot ``code``."""
    return {"PYTHONPATH": str(code), NO_BYTECODE: "1"}


def of_local_job(environ: Mapping[str, str]) -> dict[str, str]:
    return _chosen(environ, LOCAL)


def of_command(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's other commands, without variables that set options."""
    kept = {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(OPTION_PREFIXES)
    }
    return kept | {"SLURM_BITSTR_LEN": "0"}  # never shorten a list of pending elements


def _chosen(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    kept = {name: environ[name] for name in names if name in environ}
    return kept | {name: text for name, text in environ.items() if name.startswith(OF_FABRIC)}
