"""Batch scripts as text, their ``#SBATCH`` directives, and the directives that sbatch would reject.

Only this module uses submitit, which writes the directives.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from slurmrl import child
from slurmrl.errors import UsageError
from slurmrl.run.hosts import AFTER_SETUP, EARLY_TRAPS, leave_functions, try_module
from slurmrl.scheduler.base import (
    NO_BYTECODE,
    GroupRequest,
    SubmissionRequest,
    snapshot_environment,
)
from slurmrl.scheduler.client import SlurmClient

PASSED = (
    "partition",
    "account",
    "qos",
    "time",
    "constraint",
    "nodelist",
    "exclude",
    "reservation",
    "licenses",
)
"""Options of ``cluster.slurm`` that are directives of the same name."""
OURS = {
    "--array": "-a",
    "--chdir": "-D",
    "--clusters": "-M",
    "--error": "-e",
    "--export": "",
    "--export-file": "",
    "--job-name": "-J",
    "--no-kill": "-k",
    "--no-requeue": "",
    "--nodes": "-N",
    "--ntasks": "-n",
    "--ntasks-per-node": "",
    "--open-mode": "",
    "--output": "-o",
    "--parsable": "",
    "--requeue": "",
    "--signal": "",
    "--test-only": "",
    "--wait": "-W",
    "--wrap": "",
}
"""Options that slurmrl sets, with their short forms. ``extra_lines`` may not set these options."""
LETTERS: Final = re.compile(r"-([HIkOQsvWX]*.?)")
"""Pattern of short options in one word: some options without a value, then one with a value."""
SUPERVISOR = "slurmrl.workers.supervisor"
WARNED_EARLY = "trap '(sleep 3; kill -USR2 $$) &' USR2"
"""Shell line that handles a warning during the set-up lines. The line sends the signal again 3 s
later, when the supervisor runs under the same pid."""
MODULES = """\
command -v module >/dev/null || [ ! -r /etc/profile ] || {
    slurmrl_path=$PATH; . /etc/profile; PATH=$slurmrl_path:$PATH; }"""
"""Shell lines that define ``module``. A batch script is not a login shell and inherits few
variables (`job_environment`), but sites define ``module`` in files that /etc/profile reads. The
entries of the inherited PATH stay first."""
MODULE_WORDS = re.compile(r"\b(module|ml)\b")
BLOCK = """\
slurmrl_block=
env --block-signal=USR2 true 2>/dev/null && slurmrl_block='env --block-signal=USR2'
trap '' USR2"""
"""Shell lines that block the warning signal until the supervisor has a handler. Before coreutils
8.31, ``env`` cannot block signals. A warning that arrives while Python starts is then lost."""
MOST_DIRECTIVES: Final = 4
"""Maximum number of rejected directives reported for a group."""
CHOSEN: Final = (
    *(name for name in PASSED if name != "partition"),
    *("gres", "gpus-per-node", "mem", "cpus-per-task", "nodes", "partition"),
)
"""Directives that come from settings, in the order in which `rejections` leaves them out. The
partition is last: without it, sbatch checks another partition's hosts."""
WAITS: Final = re.compile(r"busy|down, drained|not available now|inactive or drain", re.IGNORECASE)
"""Slurm's messages about a job that sbatch accepts and that has to wait."""
UNCLEAR: Final = "Requested node configuration is not available"
"""Slurm's message about hosts that do not exist, and about hosts that are out of service."""


def script(request: SubmissionRequest, group: GroupRequest, launcher: str) -> str:
    """Return the batch script of a group: directives, environment, set-up lines, one exec.

    The supervisor starts agents by ``launcher``, which is ``srun`` or ``direct``.
    """
    from submitit.slurm.slurm import _make_sbatch_string  # The import takes 0.2 s.

    unset: Any = None  # None overrides submitit's default.
    # The supervisor unblocks SIGUSR2, but other commands do not.
    prefix = "" if group.command else "$slurmrl_block "
    return _make_sbatch_string(
        command=f"exec {prefix}{shlex.join(request.command(group, launcher))}",
        folder=request.run.logs / group.name,
        job_name=unset,
        time=unset,
        wckey=unset,
        stderr_to_stdout=True,
        setup=_setup(request, group, guarded=launcher == "srun" and not group.command),
        additional_parameters=directives(request, group),
        use_srun=False,
    )


def _setup(request: SubmissionRequest, group: GroupRequest, *, guarded: bool) -> list[str]:
    """Return the shell lines before the command.

    Slurm reads directives up to the first of these lines. With ``guarded``, the script requeues
    the job if the set-up lines or the start of Python fail.
    """
    code = shlex.quote(str(request.code))
    leave = 'slurmrl_leave "$slurmrl_said"'
    return [
        *extra_lines(request, group),
        "trap '' USR1",
        "trap '' USR2" if group.command else WARNED_EARLY,
        *([_leaving(request, group), EARLY_TRAPS] if guarded else []),
        *setup_lines(request, group),
        *([AFTER_SETUP] if guarded else []),
        f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"export {NO_BYTECODE}=${{{NO_BYTECODE}-1}}",
        *([f"{try_module(request.python, SUPERVISOR)} || {leave}"] if guarded else []),
        *([] if group.command else [BLOCK]),
    ]


def _leaving(request: SubmissionRequest, group: GroupRequest) -> str:
    script = request.run.submission_script(request.number, group.name)
    exclude = str(slurm_options(request, group).get("exclude") or "")
    job = request.job_name(group.name)
    supervisor = shlex.join((*request.command(group, "srun"), "--failed"))
    variables = snapshot_environment(request.code).items()
    fail = " ".join([*(f"{name}={shlex.quote(text)}" for name, text in variables), supervisor])
    return leave_functions(request.run.run, script, job, exclude, request.number, fail)


def setup_lines(request: SubmissionRequest, group: GroupRequest) -> Sequence[str]:
    """Return the user's shell lines after lines that define ``module``. Raises UsageError."""
    lines = [str(line) for line in slurm_options(request, group).get("setup") or ()]
    text = "\n".join(lines)
    if (parsed := _parsed(text)).code:
        why = parsed.errors.partition("\n")[0].removeprefix("/dev/stdin: ")
        raise UsageError(f"cluster.slurm.setup: bash cannot parse the lines: {why}")
    if _parsed(f"{text}\n;\n").code == 0:  # The last line is open and takes the ";".
        raise UsageError(
            "cluster.slurm.setup: the lines would include the script's next lines: end the "
            "here-document, or remove the backslash at the end of the last line"
        )
    return [MODULES, *lines] if any(map(MODULE_WORDS.search, lines)) else lines


def _parsed(text: str) -> child.ChildEnd:
    """Parse shell code from standard input: arguments of a process would reveal its secrets."""
    command = ["/bin/bash", "-O", "extglob", "-n", "/dev/stdin"]  # A line may set extglob.
    return child.run(command, limit_s=10, env={"LC_ALL": "C"}, sent=text.encode())


def directives(request: SubmissionRequest, group: GroupRequest) -> dict[str, str | bool]:
    """Return all directives of a group. Raises UsageError if sbatch would misread a value."""
    slurm = slurm_options(request, group)
    spares = 0 if group.elastic else group.spares
    result: dict[str, str | bool] = {
        "array": _array(group),
        "chdir": str(request.run.run),
        "cpus-per-task": str(group.workers_per_host * group.cpus_per_worker),
        "export": "ALL",  # SlurmClient gives sbatch few variables.
        "job-name": request.job_name(group.name),
        "nodes": "1" if group.elastic else str(group.hosts + spares),
        "ntasks-per-node": "1",
        "open-mode": "append",
        "output": _output(request, group),
        "no-requeue" if not group.elastic and slurm.get("continue") == "none" else "requeue": True,
        "signal": f"B:USR2@{slurm.get('signal_lead_s', 120)}",
    }
    result |= {"no-kill": True} if spares else {}
    result |= {"hold": True} if group.elastic and group.at_once == 0 else {}
    result |= _gpus(group, slurm) | _memory(group)
    result |= {key: str(slurm[key]) for key in PASSED if slurm.get(key) is not None}
    for key, value in result.items():
        check_value(key, str(value))
    return result


def slurm_options(request: SubmissionRequest, group: GroupRequest) -> Mapping[str, Any]:
    return (request.options.get("slurm") or {}) if group.slurm is None else group.slurm


def extra_lines(request: SubmissionRequest, group: GroupRequest) -> list[str]:
    """Return the user's directives (``extra_lines``) as ``#SBATCH`` lines. Raises UsageError."""
    return [_extra_line(line) for line in slurm_options(request, group).get("extra_lines") or ()]


def check_value(key: str, value: str) -> None:
    """Raise UsageError for characters that sbatch would misread: line breaks and backslashes."""
    if any(ord(char) < 32 or char == "\x7f" for char in value):
        raise UsageError(f"--{key}={value!r}: a directive cannot hold control characters")
    if "\\" in value:
        raise UsageError(f"--{key}={value!r}: a directive cannot hold a backslash")


def _array(group: GroupRequest) -> str:
    """Return the array option. Links of a fixed group run one by one."""
    at_once = (group.at_once or group.hosts) if group.elastic else 1
    return f"0-{group.links - 1}%{at_once}"


def _gpus(group: GroupRequest, slurm: Mapping[str, Any]) -> dict[str, str | bool]:
    count = group.workers_per_host * group.gpus_per_worker
    how = slurm.get("gpu_directive") or "gres"
    if count == 0 or how == "none":
        return {}
    kind = f"{slurm['gpu_type']}:" if slurm.get("gpu_type") else ""
    return {"gres": f"gpu:{kind}{count}"} if how == "gres" else {how: f"{kind}{count}"}


def _memory(group: GroupRequest) -> dict[str, str | bool]:
    if group.mem_per_worker is None:
        return {}
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", group.mem_per_worker, re.IGNORECASE)
    if not found:
        raise UsageError(f"cluster.mem_per_worker={group.mem_per_worker!r} must be like 16G")
    return {"mem": f"{int(found[1]) * group.workers_per_host}{found[2].upper()}"}


def _output(request: SubmissionRequest, group: GroupRequest) -> str:
    """Return the output file with Slurm's ``%`` patterns. A ``%`` in its folder is doubled."""
    path = request.run.batch_log(group.name, "slurm-%A_%a")
    return f"{str(path.parent).replace('%', '%%')}/{path.name}"


def _extra_line(line: str) -> str:
    text = line.strip().removeprefix("#SBATCH").strip()
    if "\n" in text or not text.startswith("-"):
        raise UsageError(f"extra_lines: {line!r} is not a directive such as '--exclusive'")
    try:
        words = shlex.split(text, comments=True)  # A line may set several options.
    except ValueError as error:
        raise UsageError(f"extra_lines: {line!r}: {error}") from error
    for word in words:
        if named := _of_ours(word):
            raise UsageError(f"extra_lines: slurmrl itself sets {named[0]} ({line!r})")
    return f"#SBATCH {text}"


def _of_ours(word: str) -> list[str]:
    """Return the options in `OURS` that a word of a directive sets."""
    if not word.startswith("-"):
        return []  # The word is the value of the previous option.
    if word.startswith("--"):  # sbatch accepts abbreviated names of options.
        return [option for option in OURS if option.startswith(word.partition("=")[0])]
    letters = {f"-{letter}" for letter in LETTERS.findall(word)[0]}
    return [option for option, short in OURS.items() if short in letters]


@dataclass(frozen=True)
class Rejection:
    """sbatch's message about a job that it would reject, or that would have to wait."""

    group: str
    words: str
    """Slurm's message."""
    directive: str = ""
    """Name of the directive that causes the message, or the user's line; empty if no single
    directive is the cause."""

    @property
    def waits(self) -> bool:
        """Whether sbatch accepts the job."""
        return WAITS.search(self.words) is not None

    @property
    def unclear(self) -> bool:
        """Whether hosts that are out of service may be the cause."""
        return UNCLEAR in self.words


def expected_start(client: SlurmClient, request: SubmissionRequest, name: str) -> datetime:
    """Return the time at which the first job of a group would start, without submitting it.

    Raises SchedulerError.
    """
    (group,) = (one for one in request.groups if one.name == name)
    with tempfile.TemporaryDirectory(prefix="slurmrl-sbatch-") as folder:
        file = Path(folder) / "job.sh"
        text = script(request, dataclasses.replace(group, links=1), "srun")
        file.write_text(text, encoding="utf-8")
        return client.expected_start(file)


def rejections(client: SlurmClient, request: SubmissionRequest) -> Iterator[Rejection]:
    """Yield the rejections of ``sbatch --test-only``, which submits nothing.

    Raises SchedulerError if Slurm does not answer.
    """
    with tempfile.TemporaryDirectory(prefix="slurmrl-sbatch-") as folder:
        file = Path(folder) / "job.sh"
        for group in request.groups:
            yield from _of_group(client, request, dataclasses.replace(group, links=1), file)


def _of_group(
    client: SlurmClient, request: SubmissionRequest, group: GroupRequest, file: Path
) -> Iterator[Rejection]:
    def rejected(text: str) -> str | None:
        file.write_text(text, encoding="utf-8")
        return client.rejection(file)

    text = script(request, group, "srun")
    words = rejected(text)
    for _ in range(MOST_DIRECTIVES):
        if words is None:
            return
        for name, line in _candidates(text, extra_lines(request, group)):
            rest = text.replace(f"{line}\n", "", 1)
            if (other := rejected(rest)) != words:
                yield Rejection(group.name, words, name)
                text, words = rest, other
                break
        else:
            yield Rejection(group.name, words)
            return


def _candidates(text: str, extra: list[str]) -> Iterator[tuple[str, str]]:
    """Yield name and line of each directive of the script that may cause a rejection."""
    lines = text.splitlines()
    yield from ((line, line) for line in extra if line in lines)
    for name in CHOSEN:
        yield from ((name, line) for line in lines if line.startswith(f"#SBATCH --{name}="))
