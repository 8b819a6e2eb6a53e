"""Short texts about times and errors."""

from __future__ import annotations


def age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def first_line(text: object) -> str:
    """Of an error's text, which may be anything that somebody wrote into a file."""
    return str(text or "").strip().partition("\n")[0].rstrip()
