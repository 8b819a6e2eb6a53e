"""The collective that this rank is in, from torch's flight recorder.

torch records every collective of NCCL and gloo anyway (TORCH_FR_BUFFER_SIZE entries, 2000 by
default), so this adds nothing to the cost of a collective. For each group torch also keeps the
numbers of the newest collective that has begun and of the newest that has ended, which are cheap to
read. Reading the entries takes milliseconds, so it happens only for a collective that does not end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from slurmrl.run.hang import PendingCollective

SHOWN = 40
"""Number of newest collectives in a rank's stacks."""
Dump = Callable[[bool, bool], bytes]
"""(with collectives, only active ones) -> JSON"""
Place = tuple[str, str]
"""(torch's number of a group, number of a collective in it)"""


class _Entry(NamedTuple):
    """A collective in the flight recorder."""

    name: str
    number: int | None
    """Its number in the group."""
    group: str
    began: float
    """By the clock of `time.time`."""


class Collectives:
    """Tracks the pending collective. Only one thread calls it, periodically."""

    def __init__(self) -> None:
        self._pending: set[Place] = set()
        """Collectives that were pending at the last call."""
        self._looked_up: dict[Place, _Entry | None] = {}
        """Entries of those that were pending at the call before as well."""

    def waiting(self) -> PendingCollective | None:
        """Return the oldest collective that was pending at the last call too.

        None if there is none, or if torch does not report any.
        """
        pending = _pending(_dump(entries=False))
        stuck = pending & self._pending
        self._pending = pending
        self._looked_up = {place: self._looked_up[place] for place in stuck & set(self._looked_up)}
        if new := stuck - set(self._looked_up):
            entries = _dump(entries=True).get("entries", [])
            for place in new:
                self._looked_up[place] = _entry(entries, place)
        entries = [entry for entry in self._looked_up.values() if entry is not None]
        if not entries:
            return None
        oldest = min(entries, key=attrgetter("began"))
        since_s = max(time.time() - oldest.began, 0.0)
        ranks = tuple(_ranks(oldest.group))
        return PendingCollective(
            name=oldest.name,
            number=oldest.number,
            group=oldest.group,
            ranks=ranks,
            since_s=since_s,
        )

    def recorded(self) -> str:
        """Return the newest collectives as text, the newest last."""
        lines = []
        for entry in _dump(entries=True).get("entries", [])[-SHOWN:]:
            known = _parse(entry)
            state = "ended" if entry.get("retired") else entry.get("state", "")
            sizes = ", ".join(map(str, entry.get("input_sizes", [])))
            collective = f"{known.name} #{known.number} of group {known.group}"
            lines.append(f"  {collective}, {sizes}: {state}\n")
        head = f"Newest {len(lines)} collectives of torch's flight recorder, the newest last:\n"
        return head + "".join(lines) if lines else ""


def _dump(*, entries: bool) -> dict[str, Any]:
    """Return the flight recorder's content for this rank's backend; empty if it is unavailable."""
    if not dist.is_initialized():
        return {}
    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump: Dump | None = getattr(c10d, f"_dump_{kind}_trace_json", None)
    if dump is None:
        return {}
    try:
        content = json.loads(dump(entries, False))
    except (RuntimeError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _pending(content: Mapping[str, Any]) -> set[Place]:
    """Return each group's newest collective, if it has not ended."""
    groups: Mapping[str, Mapping[str, str]] = content.get("pg_status", {})
    return {
        (group, numbers.get("last_enqueued_collective", ""))
        for group, numbers in groups.items()
        if numbers.get("last_enqueued_collective") != numbers.get("last_completed_collective")
    }


def _entry(entries: Sequence[Mapping[str, Any]], place: Place) -> _Entry | None:
    """Return the first pending collective of a group: the later ones wait for it."""
    group = place[0]
    for entry in entries:
        if str(entry.get("pg_id")) == group and not entry.get("retired"):
            return _parse(entry)
    return None


def _parse(entry: Mapping[str, Any]) -> _Entry:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    return _Entry(
        str(entry.get("profiling_name", "?")).rpartition(":")[2],
        number if isinstance(number, int) else None,
        str((entry.get("process_group") or ["?"])[0]),
        float(entry.get("time_created_ns", 0)) / 1e9,
    )


def _ranks(group: str) -> list[int]:
    """Return the ranks of the group of this name; empty if torch does not know it."""
    try:
        return list(dist.get_process_group_ranks(c10d._resolve_process_group(GroupName(group))))
    except (RuntimeError, ValueError, KeyError):
        return []
