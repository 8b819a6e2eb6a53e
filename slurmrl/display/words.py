"""Short texts about times, ends of processes and errors."""

from __future__ import annotations

import signal

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


def signal_name(number: int) -> str:
    """Return ``SIGKILL``, or ``signal 40`` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_words(code: int) -> str:
    """Return ``SIGKILL`` or ``exited with code 7``. ``code`` is negative for a signal."""
    return signal_name(-code) if code < 0 else f"exited with code {code}"


def first_line(text: object) -> str:
    """Return the first line of an error's text, which may come from a damaged file."""
    return plain(str(text or "").strip().partition("\n")[0])


def plain(text: str) -> str:
    """Return the text on one line, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text).strip()
