"""Site profiles: settings that all of a user's configurations for a cluster share.

When a trial is submitted or planned, ``~/.config/slurmrl/NAME.yaml`` supplies values that the
configuration does not set (`load.put_under`). The trial records the result, so readers of its run
directory need no profile. Commands without a configuration take the folder of all runs from the
profile.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from slurmrl import env
from slurmrl.errors import ConfigError, UsageError
from slurmrl.fsio import atomic
from slurmrl.registry import near

DEFAULT: Final = "default"
NONE: Final = "none"
SUFFIX: Final = ".yaml"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ROOT_RULE: Final = (
    "must be an absolute path, since all commands use it: /shared/me/runs, ~/runs or $SCRATCH/runs"
)


def folder() -> Path:
    """Return the folder of all profiles."""
    base = env.XDG_CONFIG_HOME.get() or os.path.expanduser("~/.config")
    return Path(os.path.abspath(base)) / "slurmrl"


def file_of(name: str) -> Path:
    """Return the path of a profile, which need not exist. Raises UsageError for an invalid name."""
    if not _NAME.fullmatch(name) or name == NONE:
        raise UsageError(
            f"profile '{name}': a name has 1 to 64 letters, digits, '.', '_' or '-', begins with a "
            f"letter or a digit, and is not '{NONE}'"
        )
    return folder() / f"{name}{SUFFIX}"


def names() -> list[str]:
    """Return the names of all profiles."""
    try:
        entries = sorted(os.listdir(folder()))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (entry.removesuffix(SUFFIX) for entry in entries if entry.endswith(SUFFIX))
    return [name for name in found if _NAME.fullmatch(name)]


def in_force() -> Path | None:
    """Return the file of the selected profile; None without a profile.

    The environment variable `env.PROFILE` selects a profile, else the profile ``default`` or the
    only existing profile is selected. Raises UsageError if the selected profile does not exist, or
    if several profiles exist and none is selected.
    """
    wanted = env.PROFILE.get()
    if wanted == NONE:
        return None
    known = names()
    if wanted:
        path = file_of(wanted)
        if wanted not in known:
            choices = near(wanted, [*known, NONE])
            raise UsageError(f"profile '{wanted}' does not exist ({path}); {choices}")
        return path
    if not known:
        return None
    if DEFAULT not in known and len(known) > 1:
        raise UsageError(
            f"{folder()} has several profiles and none is '{DEFAULT}': select one of "
            f"{', '.join([*known, NONE])} with --profile or {env.PROFILE.name}"
        )
    return file_of(DEFAULT if DEFAULT in known else known[0])


def root() -> str | None:
    """Return the selected profile's folder of all runs, or None. Raises UsageError."""
    path = in_force()
    if path is None:
        return None
    from slurmrl.config.source import read  # The import of YAML takes longer than most commands.

    atomic.check_file_ownership(path)
    source = read(path)
    value = source.values.get("root")
    if value is None:
        return None
    if not isinstance(value, str) or not is_root(value):
        message = f"{value!r} is not allowed: {ROOT_RULE}"
        raise ConfigError((source.problem(("root",), message),))
    try:
        return expanded(value)
    except UsageError as error:
        raise ConfigError((source.problem(("root",), str(error)),)) from error


def is_root(text: str) -> bool:
    """Return whether a profile may set this folder of all runs, which must not be relative."""
    return text.startswith(("/", "~", "$"))


_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\}|\()")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def expanded(text: str) -> str:
    """Return a path after replacing a leading ``~`` or ``~user``, ``$NAME`` and ``${NAME}``.

    Raises UsageError if a variable has no value or the user does not exist.
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
    if not _VARIABLE_NAME.fullmatch(name):
        raise UsageError(
            f"{text!r} is not allowed: a path may contain $NAME and ${{NAME}}, but no other "
            "substitution of the shell"
        )
    if not (value := os.environ.get(name)):
        raise UsageError(
            f"{text!r} is not allowed: the environment variable {name} is not set or is empty; set "
            "the variable, or write the path itself"
        )
    return value
