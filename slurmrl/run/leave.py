"""Shell text by which a job leaves when nothing can start in it, since Python may be missing.

A batch script tries its interpreter before it becomes the supervisor; each host of a job does the
same before it becomes an agent. The supervisor runs the same text when its agents could not start.
It records the failure (`run.hosts` reads the record), excludes the host from the queued jobs
of the trial, waits longer the more starts in a row have failed, and requeues the job, so that no
link is used up. After MOST failures in a row the job ends instead.

A failing line of ``cluster.slurm.setup`` is handled in the same way at first. If it fails in the
same way on SEVERAL hosts, or repeatedly on one without which no job could start, and has not worked
for this submission, it is the user's: the trial ends as FAILED with the line in the reason, and the
hosts are not excluded for it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from slurmrl import package

FIRST_S = 5
LONGEST_S = 300
"""Pauses, in seconds: after the first failed start, and the longest."""
MOST = 20
"""Failed starts in a row, since the history last grew, after which jobs are not requeued."""
SEVERAL = 3
"""Hosts on which the same failure of the set-up lines is not the fault of the hosts."""
TRY_S = 300
"""Seconds an interpreter may take to import a module."""

EARLY = """\
shopt -s execfail
trap 'slurmrl_told=1; exit 143' TERM
trap 'slurmrl_code=$?
[ $slurmrl_code = 0 ] || slurmrl_ended $slurmrl_code "${BASH_COMMAND:-}"' EXIT
slurmrl_setup=yes"""
"""From here on a bash script that ends early does not use up its link; without execfail, a failing
exec would skip the trap. The set-up lines follow."""
LATE = """\
slurmrl_setup=
command -v srun >/dev/null || export PATH=$PATH:$slurmrl_own_path"""
"""The set-up lines have run. ``module purge`` may have taken Slurm's commands from PATH."""


def functions(
    run: Path, script: Path, job: str, exclude: str, number: int = 0, fail: str = "false"
) -> str:
    """Return the shell functions.

    ``job``: name of the group's first array; ``exclude``: hosts that the user excludes, in Slurm's
    form. Where set-up lines follow: ``number`` of the submission, ``fail``: command that ends the
    trial with its last argument as the reason.
    """
    values = {
        "run": str(run),
        "script": str(script),
        "number": str(number),
        "job": job,
        "exclude": exclude,
        "first_s": str(FIRST_S),
        "longest_s": str(LONGEST_S),
        "most": str(MOST),
        "several": str(SEVERAL),
    }
    lines = [f"slurmrl_{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append(f'slurmrl_fail() {{ {fail} "$1"; }}')
    return "\n".join([*lines, _text()])


def _text() -> str:
    return package.read("scheduler/leave.sh").decode().rstrip()


def shortened(script: str) -> str:
    """Return a batch script for people, with one line in place of the functions."""
    text = _text()
    before, found, after = script.partition(text)
    begin = before.find("\nslurmrl_run=")
    if not found or begin < 0:
        return script
    count = before[begin:].count("\n") + text.count("\n")
    note = f"# … {count} lines: how the job leaves if nothing can start in it (--json shows them)"
    return f"{before[: begin + 1]}{note}{after}"


def guarded(run: Path, python: str, module: str) -> list[str]:
    """Return the prefix of a module's command on each host of a job.

    Where the module cannot run, the prefix records that with the host's name.
    """
    text = (
        f"trap '' USR1 USR2\n{functions(run, Path('/dev/null'), '', '')}\n{attempt(python, module)}"
    )
    return ["sh", "-c", f'{text} || {{ {RECORD}; }}\nexec "$@"', "sh"]


RECORD = 'slurmrl_record "$slurmrl_said" "$slurmrl_host"; printf "%s\\n" "$slurmrl_said"; exit 1'


def attempt(python: str, module: str) -> str:
    """Return a command that fails, with the reason in ``slurmrl_said``, if a module cannot run."""
    tried = shlex.join([python, "-P", "-c", f"import {module}.__main__"])
    return f"slurmrl_said=$(timeout {TRY_S} {tried} 2>&1)"
