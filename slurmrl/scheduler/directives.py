"""The ``#SBATCH`` directives of a group, as a table: name -> value (True: no value)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.scheduler.base import Continue, GroupRequest, SubmissionRequest

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
    "--wait": "-W",
    "--wrap": "",
}
"""Options that extra lines may not change, with their short forms: the protocol rests on them."""


def table(request: SubmissionRequest, group: GroupRequest) -> dict[str, str | bool]:
    """All directives of a group. Raises UsageError for a value that a script cannot hold."""
    slurm = slurm_options(request, group)
    spares = 0 if group.elastic else group.spares
    result: dict[str, str | bool] = {
        "array": _array(group),
        "chdir": str(request.run.run),
        "cpus-per-task": str(group.workers_per_host * group.cpus_per_worker),
        "export": "ALL",  # of what our client gives sbatch: see environment.EXPORTED
        "job-name": request.job_name(group.name),
        "nodes": "1" if group.elastic else str(group.hosts + spares),
        "ntasks-per-node": "1",
        "open-mode": "append",
        "output": _output(request, group),
        "requeue" if group.elastic or _mode(slurm) is not Continue.NONE else "no-requeue": True,
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
    options: Mapping[str, Any] = request.options.get("slurm") or {}
    return options if group.slurm is None else group.slurm


def extra_lines(request: SubmissionRequest, group: GroupRequest) -> list[str]:
    """The user's own directives: ``--exclusive`` or ``#SBATCH --exclusive``."""
    return [_extra_line(line) for line in slurm_options(request, group).get("extra_lines") or ()]


def check_value(key: str, value: str) -> None:
    """Refuse what sbatch would read as something else: line breaks and backslashes."""
    if any(ord(char) < 32 or char == "\x7f" for char in value):
        raise UsageError(f"--{key}={value!r}: a directive cannot hold control characters")
    if "\\" in value:
        raise UsageError(f"--{key}={value!r}: a directive cannot hold a backslash")


def _mode(slurm: Mapping[str, Any]) -> Continue:
    """What follows a link of a fixed group."""
    return Continue(slurm.get("continue") or Continue.CHAIN)


def _array(group: GroupRequest) -> str:
    """Links of a fixed group run one after the other. For Slurm a throttle of 0 is none."""
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
        raise UsageError(
            f"cluster.mem_per_worker={group.mem_per_worker!r}: write a whole number and a unit, "
            "such as 16G"
        )
    return {"mem": f"{int(found[1]) * group.workers_per_host}{found[2].upper()}"}


def _output(request: SubmissionRequest, group: GroupRequest) -> str:
    """Slurm fills in array id and element; percent signs of the folder itself are doubled."""
    path = request.run.batch_log(group.name, "slurm-%A_%a")
    return f"{str(path.parent).replace('%', '%%')}/{path.name}"


def _extra_line(line: str) -> str:
    text = line.strip().removeprefix("#SBATCH").strip()
    if "\n" in text or not text.startswith("-"):
        raise UsageError(f"extra_lines: {line!r} is not a directive such as '--exclusive'")
    word = re.split(r"[=\s]", text, maxsplit=1)[0]
    taken = {*OURS, *filter(None, OURS.values())}
    if word in taken or (not word.startswith("--") and word[:2] in taken):
        raise UsageError(f"extra_lines: slurmrl itself sets {word} ({line!r})")
    return f"#SBATCH {text}"
