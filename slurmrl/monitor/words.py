"""Short texts about times and errors."""

from __future__ import annotations

UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def age(seconds: float | None) -> str:
    """Return ``40 s``, ``2.5 min``, ``3 h``: two digits are enough for people."""
    if seconds is None:
        return ""
    for unit, size in UNITS:
        if seconds >= 2 * size:
            value = seconds / size
            shown = f"{value:.1f}".removesuffix(".0") if value < 9.95 else f"{value:.0f}"
            return f"{shown} {unit}"
    return f"{seconds:.0f} s"


def first_line(text: object) -> str:
    """Return the first line of an error's text, which may come from a damaged file."""
    return plain(str(text or "").strip().partition("\n")[0])


def plain(text: str) -> str:
    """Return the text on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text).strip()
