"""Records of failed hosts and of hosts that a trial's jobs avoid, and shell code that writes them.

``hosts/start.SLOTS.START.HOST.json``: a start failed before an incarnation began, when the history
had SLOTS records. ``lost.INCARNATION.HOST.json``: an incarnation failed because of the host itself.
``lost.INCARNATION-TASK-ATTEMPT.HOST.json``: an attempt at a rollout task failed because of the host
during that incarnation.
``avoid.HOST.json``: jobs avoid the host. Each file is created atomically and never changed.

Shell code in batch scripts also writes files of the first and the last kind, because Python may be
missing. A batch script tries its interpreter before it becomes the supervisor; each host of a job
does the same before it becomes an agent. The supervisor runs the same shell code when its agents
could not start. The code records the failure and excludes the host from the queued jobs of the
trial. Then the code waits (longer after each failed start in a row) and requeues the job, so that
no link is used up. After more than MOST_FAILED failures in a row, the job ends.

The shell code first treats a failing line of ``cluster.slurm.setup`` like any other failed start.
The line itself is at fault if it has never worked for this submission and fails in the same way on
SEVERAL_HOSTS, or repeatedly on a host that every job needs. The trial then ends as FAILED with the
line in the reason, and the hosts are not excluded.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmrl import package
from slurmrl.errors import UsageError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import SECONDS, TEXT
from slurmrl.run.history.slots import History
from slurmrl.run.paths import RunPaths

LOSSES = 2
"""Number of failures of incarnations and rollout tasks because of a host, after which jobs avoid
the host."""
LONGEST_WHY = 400

FIELDS = {"host": TEXT, "why": TEXT, "start": TEXT, "time": SECONDS}

_HOST = re.compile(r"[\w.-]{1,200}", re.ASCII)
_AVOID = re.compile(r"avoid\.(?P<host>[\w.-]+)\.json", re.ASCII)
_LOST = re.compile(r"lost\.(?P<incarnation>\d+)(?:-\d+-\d+)?\.(?P<host>[\w.-]+)\.json", re.ASCII)
_START = re.compile(
    r"start\.(?P<slots>\d+)\.(?P<start>\d+\.\d+)\.(?P<host>[\w.-]*)\.json", re.ASCII
)


@dataclass(frozen=True)
class BadHost:
    """A host and the reason of its failure."""

    host: str
    """Name of the host; empty if it is unknown."""
    why: str
    start: str = ""
    """The job that found the failure, ``JOBID.RESTARTCOUNT``."""


def avoided(run: RunPaths) -> list[BadHost]:
    """Return the hosts that the trial's jobs avoid, sorted by name. Raises CorruptFileError."""
    return [_read(run, file) for file in _names(run) if _AVOID.fullmatch(file)]


def failed_starts(run: RunPaths, start: str | None = None) -> list[BadHost]:
    """Return the failed starts of the trial, or only the failures in one ``start`` of a job."""
    return [
        _read(run, file)
        for file in _names(run)
        if (found := _START.fullmatch(file)) and start in (None, found["start"])
    ]


def newest_failed_starts(run: RunPaths) -> list[BadHost]:
    """Return the failed starts since the history last grew, oldest first."""
    found = [(match, file) for file in _names(run) if (match := _START.fullmatch(file))]
    slots = History(run.history).count() if found else 0
    now = [
        ([int(part) for part in match["start"].split(".")], file)
        for match, file in found
        if int(match["slots"]) == slots
    ]
    return [_read(run, file) for _, file in sorted(now)]


def record_start(run: RunPaths, slots: int, start: str, host: str, why: str) -> None:
    """Record a start of a job that failed because of a host before an incarnation began.

    ``start`` is ``JOBID.RESTARTCOUNT``. Batch scripts write the same record.
    """
    _create(run, f"start.{slots}.{start}.{host}.json", host, why, start)


def blame(
    run: RunPaths, host: str, incarnation: int, why: str, attempt: tuple[int, int] | None = None
) -> bool:
    """Record a failure because of a host. Return whether jobs must avoid the host now.

    ``attempt``: task and number of the failed attempt at a rollout task; None if the incarnation
    itself failed.
    """
    if not _HOST.fullmatch(host):
        return False
    what = "-".join(map(str, (incarnation, *(attempt or ()))))
    _create(run, f"lost.{what}.{host}.json", host, why)
    found = [m for name in _names(run) if (m := _LOST.fullmatch(name)) and m["host"] == host]
    return len(found) >= LOSSES


def blamed(run: RunPaths) -> dict[str, int]:
    """Return the hosts that caused failures, each with the incarnation of its newest failure."""
    newest: dict[str, int] = {}
    for file in _names(run):
        if match := _LOST.fullmatch(file):
            host = match["host"]
            newest[host] = max(newest.get(host, 0), int(match["incarnation"]))
    return newest


def avoid(run: RunPaths, host: str, why: str) -> None:
    _create(run, f"avoid.{host}.json", host, why)


def chosen(run: RunPaths, wanted: Iterable[str]) -> list[str]:
    """Return the wanted hosts; ``all`` means all hosts that jobs avoid.

    Raises UsageError for a host that jobs do not avoid.
    """
    known = [bad.host for bad in avoided(run)]
    names = list(dict.fromkeys(wanted))
    unknown = [host for host in names if host not in (*known, "all")]
    if unknown:
        choices = f"excluded hosts: {', '.join(known)}" if known else "no host is excluded"
        raise UsageError(f"{', '.join(unknown)}: not excluded from this trial's jobs; {choices}")
    return known if "all" in names else names


def include(run: RunPaths, names: Collection[str]) -> None:
    """Delete the records of these hosts, so that jobs may use them again."""
    for file in _names(run):
        found = _AVOID.fullmatch(file) or _LOST.fullmatch(file) or _START.fullmatch(file)
        if found and found["host"] in names:
            atomic.remove(run.hosts / file)


def _create(run: RunPaths, name: str, host: str, why: str, start: str = "") -> None:
    atomic.make_private_directory(run.hosts)
    text = {"host": host, "why": why[-LONGEST_WHY:], "start": start, "time": int(time.time())}
    atomic.exclusive_create(run.hosts / name, json.dumps(text).encode())


def _read(run: RunPaths, name: str) -> BadHost:
    values = documents.read(run.hosts / name, FIELDS, ("host", "why"))
    return BadHost(values["host"], values["why"][:LONGEST_WHY], values.get("start") or "")


def _names(run: RunPaths) -> list[str]:
    try:
        return sorted(atomic.list_names(run.hosts))
    except FileNotFoundError:
        return []


FIRST_S = 5
LONGEST_S = 300
"""Pause in seconds after the first failed start, and the maximum pause after later starts."""
MOST_FAILED = 20
"""Maximum number of failed starts in a row, since the history last grew, that requeue the job."""
SEVERAL_HOSTS = 3
"""Number of hosts on which the same set-up line must fail before the line counts as wrong."""
TRY_S = 300
"""Maximum number of seconds that an interpreter may take to import a module."""

EARLY_TRAPS = """\
shopt -s execfail
trap 'slurmrl_told=1; exit 143' TERM
trap 'slurmrl_ended $? "${BASH_COMMAND:-}"' EXIT
slurmrl_setup=yes"""
"""Shell code before the set-up lines. A script that ends early, even with exit code 0, then does
not use up its link. Without execfail, a failing exec would skip the trap."""
AFTER_SETUP = """\
slurmrl_setup=
unset IFS
command -v srun >/dev/null || export PATH=$PATH:$slurmrl_own_path"""
"""Shell code after the set-up lines. ``module purge`` may have removed Slurm's commands from PATH.
"""
RECORD_AND_EXIT = (
    'slurmrl_record "$slurmrl_said" "$slurmrl_host"; printf "%s\\n" "$slurmrl_said"; exit 1'
)


def leave_functions(
    run: Path, script: Path, job: str, exclude: str, number: int = 0, fail: str = "false"
) -> str:
    """Return the shell functions with which a job leaves a host.

    ``job``: name of the group's first array; ``exclude``: hosts that the user excludes, in Slurm's
    form. If set-up lines follow, ``number`` is the submission's number, and ``fail`` is the command
    that ends the trial; its last argument is the reason.
    """
    values = {
        "run": str(run),
        "script": str(script),
        "number": str(number),
        "job": job,
        "exclude": exclude,
        "first_s": str(FIRST_S),
        "longest_s": str(LONGEST_S),
        "most": str(MOST_FAILED),
        "several": str(SEVERAL_HOSTS),
    }
    lines = [f"slurmrl_{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append(f'slurmrl_fail() {{ {fail} "$1"; }}')
    return "\n".join([*lines, _leave_text()])


def _leave_text() -> str:
    return package.read("scheduler/leave.sh").decode().rstrip()


def shorten_script(script: str) -> str:
    """Return a batch script for display. One line replaces the functions."""
    text = _leave_text()
    before, found, after = script.partition(text)
    begin = before.find("\nslurmrl_run=")
    if not found or begin < 0:
        return script
    count = before[begin:].count("\n") + text.count("\n")
    note = f"# … {count} lines that end the job if nothing can start in it (--json shows them)"
    return f"{before[: begin + 1]}{note}{after}"


def guard_command(run: Path, python: str, module: str) -> list[str]:
    """Return a prefix for the command with which each host of a job runs a module.

    The prefix first tests whether the module can run, and records a failure with the host's name.
    """
    functions = leave_functions(run, Path("/dev/null"), "", "")
    text = f"trap '' USR1 USR2\n{functions}\n{try_module(python, module)}"
    return ["/bin/sh", "-c", f'{text} || {{ {RECORD_AND_EXIT}; }}\nexec "$@"', "sh"]


def try_module(python: str, module: str) -> str:
    """Return a command that fails, with the reason in ``slurmrl_said``, if a module cannot run."""
    tried = shlex.join([python, "-P", "-c", f"import {module}.__main__"])
    return f"slurmrl_said=$(timeout {TRY_S} {tried} 2>&1)"
