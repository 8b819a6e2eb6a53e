"""Variables of the environment in paths: ``$SCRATCH/runs``."""

from __future__ import annotations

import os
import re
from typing import Final

from slurmrl.errors import UsageError

_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\}|\()")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expanded(text: str) -> str:
    """Replace a leading ``~`` or ``~user`` and each ``$NAME`` or ``${NAME}`` in a path.

    :raises UsageError: a variable has no value, or there is no such user.
    """
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = path[1:].partition("/")[0]
        who = f"there is no user '{user}'" if user else "HOME is not set"
        raise UsageError(
            f"{text!r} is not allowed: {who}; write ./{path} for a folder of that name"
        )
    return _VARIABLE.sub(lambda found: _variable(text, found), path)


def _variable(text: str, found: re.Match[str]) -> str:
    name = found[1] or found[2] or ""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{text!r} is not allowed: of the shell's substitutions, a path may have only $NAME "
            "and ${NAME}"
        )
    if not (value := os.environ.get(name)):
        raise UsageError(
            f"{text!r} is not allowed: the environment variable {name} is not set or empty; set "
            "it, or write the path itself"
        )
    return value
