"""Values of flags in the arguments of a server (`rollout.server_args`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final

LEAST: Final = len("--tp")
"""argparse also knows a flag by its beginning; no shorter one is looked for."""


def last_value(arguments: Sequence[str], flags: Collection[str]) -> str | None:
    """Return the value of the last argument that is one of the flags, as argparse reads it: behind
    `=` or in the next word, with `_` for `-`, and by a beginning of the flag. None without one."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    found = [
        value for word, value in pairwise(words) if any(_is_flag(word, flag) for flag in flags)
    ]
    return found[-1] if found else None


def _is_flag(word: str, flag: str) -> bool:
    word = word.replace("_", "-")
    return word == flag or (word.startswith("--") and len(word) >= LEAST and flag.startswith(word))
