"""Detection of processes of this host that the kernel killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

OWN_CGROUPS = Path("/proc/self/cgroup")
COUNTER = "oom_kill"


class OomKills:
    """Reads the kernel's count of such kills from the most precise counter of this machine: that of
    our control group (version 2, else 1), else that of the whole host. Our children are in that
    group or below it, also in containers."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._path = next((path for path in _counters(root) if _count(path) is not None), None)
        self._seen = self._count()

    def happened(self) -> bool:
        """Return whether there was one since the last call, or since the start."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        return (_count(self._path) if self._path is not None else None) or 0


def _counters(root: Path) -> list[Path]:
    """Return the files that may hold the count, the most precise one first."""
    counters: list[Path] = []
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / OWN_CGROUPS.relative_to("/")).splitlines():
        _, controllers, group = line.split(":", 2)
        own = group.lstrip("/")
        if not controllers:
            folders = (mounted, mounted / "unified")
            counters += [folder / own / "memory.events" for folder in folders]
        elif "memory" in controllers.split(","):
            counters.append(mounted / "memory" / own / "memory.oom_control")
    return [*counters, root / "proc/vmstat"]


def _count(path: Path) -> int | None:
    """Return the number in the counter's line, or None if there is no such line."""
    fields = [line.split() for line in _read(path).splitlines()]
    counts = [words[1] for words in fields if len(words) == 2 and words[0] == COUNTER]
    return int(counts[0]) if counts and counts[0].isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
