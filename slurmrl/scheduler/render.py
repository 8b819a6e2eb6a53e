"""Batch scripts as text. Only this module uses submitit, which writes the directives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from slurmrl.run import leave
from slurmrl.scheduler import directives
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.environment import NO_BYTECODE, of_snapshot


def script(request: SubmissionRequest, group: GroupRequest, launcher: str) -> str:
    """Return the batch script of a group: directives, environment, set-up lines, one exec.

    ``launcher`` is how the supervisor starts agents: ``srun`` or ``direct``.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # a fifth of a second of imports

    unset: Any = None  # submitit's own defaults are not ours
    return _make_sbatch_string(
        command=f"exec {_prefix(group)}{shlex.join(request.command(group, launcher))}",
        folder=request.run.logs / group.name,
        job_name=unset,
        time=unset,
        wckey=unset,
        stderr_to_stdout=True,
        setup=_setup(request, group, guarded=launcher == "srun" and not group.command),
        additional_parameters=directives.table(request, group),
        use_srun=False,
    )


SUPERVISOR = "slurmrl.workers.supervisor"

WARNED_EARLY = "trap '(sleep 3; kill -USR2 $$) &' USR2"
"""Resends a warning that comes during the set-up lines once the supervisor, of the same pid,
runs."""

MODULES = """\
command -v module >/dev/null || [ ! -r /etc/profile ] || {
    slurmrl_path=$PATH; . /etc/profile; PATH=$slurmrl_path:$PATH; }"""
"""A batch script is no login shell and inherits few variables (see ``environment``), while sites
define ``module`` in files that /etc/profile reads. Our own PATH stays in front."""
MODULE_WORDS = re.compile(r"\b(module|ml)\b")

BLOCK = """\
slurmrl_block=
env --block-signal=USR2 true 2>/dev/null && slurmrl_block='env --block-signal=USR2'
trap '' USR2"""
"""From here on a warning is blocked until the supervisor has its handler. With an older env
(coreutils before 8.31), a warning that comes while Python starts is lost."""


def _prefix(group: GroupRequest) -> str:
    """Only the supervisor knows that it must unblock the signal."""
    return "" if group.command else "$slurmrl_block "


def _setup(request: SubmissionRequest, group: GroupRequest, *, guarded: bool) -> list[str]:
    """Return the shell lines before the command. Slurm reads directives up to the first of them.
    ``guarded``: the job is requeued if they or Python fail."""
    code = shlex.quote(str(request.code))
    return [
        *directives.extra_lines(request, group),
        "trap '' USR1",
        "trap '' USR2" if group.command else WARNED_EARLY,
        *([_leaving(request, group), leave.EARLY] if guarded else []),
        *setup_lines(request, group),
        *([leave.LATE] if guarded else []),
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"export {NO_BYTECODE}=${{{NO_BYTECODE}-1}}",
        *([f'{_attempt(request)} || slurmrl_leave "$slurmrl_said"'] if guarded else []),
        *([] if group.command else [BLOCK]),
    ]


def _leaving(request: SubmissionRequest, group: GroupRequest) -> str:
    script = request.run.submission_script(request.number, group.name)
    exclude = str(directives.slurm_options(request, group).get("exclude") or "")
    job = request.job_name(group.name)
    supervisor = shlex.join((*request.command(group, "srun"), "--failed"))
    variables = of_snapshot(request.code).items()
    fail = " ".join([*(f"{name}={shlex.quote(text)}" for name, text in variables), supervisor])
    return leave.functions(request.run.run, script, job, exclude, request.number, fail)


def _attempt(request: SubmissionRequest) -> str:
    return leave.attempt(request.python, SUPERVISOR)


def setup_lines(request: SubmissionRequest, group: GroupRequest) -> Sequence[str]:
    """Return the user's shell lines (``setup``), and what they need."""
    lines = [str(line) for line in directives.slurm_options(request, group).get("setup") or ()]
    return [MODULES, *lines] if any(map(MODULE_WORDS.search, lines)) else lines
