"""Batch scripts as text. The only file that knows submitit, which writes the directives."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from slurmrl.scheduler import directives
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest


def script(request: SubmissionRequest, group: GroupRequest, launcher: str) -> str:
    """The batch script of a group: directives, environment, set-up lines, one exec.

    ``launcher`` is how the supervisor starts agents: ``srun`` or ``direct``.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # a fifth of a second of imports

    unset: Any = None  # submitit's own defaults are not ours
    return _make_sbatch_string(
        command=f"exec {shlex.join(request.command(group, launcher))}",
        folder=request.run.logs / group.name,
        job_name=unset,
        time=unset,
        wckey=unset,
        stderr_to_stdout=True,
        setup=_setup(request),
        additional_parameters=directives.table(request, group),
        use_srun=False,
    )


def _setup(request: SubmissionRequest) -> list[str]:
    """Shell lines before the command. Slurm reads directives up to the first of them."""
    code = shlex.quote(str(request.run.code))
    return [
        *directives.extra_lines(request),
        # A warning that comes before Python is up must not kill the shell.
        "trap '' USR1 USR2",
        *setup_lines(request),
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"',
    ]


def setup_lines(request: SubmissionRequest) -> Sequence[str]:
    """The user's own shell lines (``cluster.slurm.setup``)."""
    return [str(line) for line in directives.slurm_options(request).get("setup") or ()]
