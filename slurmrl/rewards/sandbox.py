"""The sandbox of programs, as a program that judges' pools run (`code_sandbox`)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Literal, get_args

from slurmrl import log, package
from slurmrl.errors import UsageError
from slurmrl.rewards.judge import JudgeProgram

logger = log.get(__name__)

LOADER = """\
import json, os
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 65536) or os._exit(0)
setup = json.loads(line)
space = {"__name__": "sandbox"}
exec(compile(setup["source"], "code_sandbox.py", "exec"), space)
space["main"](setup["settings"])
"""
"""Reads the sandbox's source from the first line of its input, and runs it."""
MOST_REPLY_BYTES = 64 << 20
Namespaces = Literal["auto", "required", "off"]
"""Whether programs are isolated by Linux namespaces: ``auto`` where possible."""
MISSING = {
    "network": "they can use the network",
    "files": "they can change the user's files",
    "processes": "nothing limits the number of their processes",
}
"""What it means that a sandbox lacks a protection."""


def sandbox_program(
    *,
    container: str | Sequence[str],
    python: str,
    memory_mib: int,
    files_mib: int,
    max_processes: int,
    namespaces: Namespaces,
) -> JudgeProgram:
    """A process that runs programs (see `CodeReward` for the settings).

    :raises UsageError: a limit or ``namespaces`` is not allowed.
    """
    check_limits(memory_mib=memory_mib, files_mib=files_mib, max_processes=max_processes)
    check_choice("namespaces", namespaces, get_args(Namespaces))
    prefix = shlex.split(container) if isinstance(container, str) else list(container)
    settings = {
        "memory_bytes": memory_mib << 20,
        "files_bytes": files_mib << 20,
        "most_processes": max_processes,
        "namespaces": namespaces != "off",
    }
    interpreter = python or ("python3" if prefix else sys.executable)
    source = package.read("rewards/code_sandbox.py").decode()
    return JudgeProgram(
        "the sandbox of programs",
        [*prefix, interpreter, "-I", "-c", LOADER],
        setup={"source": source, "settings": settings},
        most_reply_bytes=MOST_REPLY_BYTES,
    )


def check_limits(**limits: Any) -> None:
    """Check limits of programs by the names of their options.

    :raises UsageError: one is not a positive number.
    """
    for name, value in limits.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < inf:
            raise UsageError(
                f"{name} {value!r} is not allowed: limits of programs must be positive numbers"
            )


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """
    :raises UsageError: the value of an option is not among those allowed.
    """
    if value not in allowed:
        raise UsageError(f"{name} {value!r} is not allowed; allowed: {', '.join(allowed)}")


def check_isolation(user: str, facts: Mapping[str, Any], *, required: bool) -> None:
    """Report what a sandbox cannot prevent here, given what it says about itself.

    :raises UsageError: isolation is ``required`` and something is missing.
    """
    have = facts.get("protections", {})
    missing = [text for name, text in MISSING.items() if not have.get(name)]
    if missing and required:
        raise UsageError(
            f"{user} cannot isolate programs here: {'; '.join(missing)}. Allow user "
            "namespaces, configure a container, or set namespaces: auto"
        )
    if missing:
        logger.warning("programs are not isolated here: %s", "; ".join(missing))
