"""Which collective this rank is in, by torch's flight recorder.

torch records every collective of NCCL and gloo by itself (TORCH_FR_BUFFER_SIZE entries, 2000 by
default), so that nothing is added to a collective's cost. Of each group it also keeps the numbers
of the newest collective that was begun and of the newest that has ended: those are cheap to look
at. The entries are not (milliseconds), so they are read only for one that does not end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

SHOWN = 40
"""Newest collectives that are shown with a rank's stacks."""
Dump = Callable[[bool, bool], bytes]
"""(with collectives, only active ones) -> JSON"""
Place = tuple[str, str]
"""torch's number of a group, and of a collective in it."""


class Collectives:
    """Looked at by one thread, from time to time."""

    def __init__(self) -> None:
        self._pending: set[Place] = set()
        """What had not ended at the last look."""
        self._looked_up: dict[Place, dict[str, Any] | None] = {}
        """Entries of those that had not ended at the look before either."""

    def waiting(self) -> dict[str, Any] | None:
        """The collective that has not ended since the last look at least: ``name``, its ``number``
        in its group, the ``ranks`` of that, and its age ``since_s``. None where there is none, or
        where torch does not say."""
        pending = _pending(_dump(entries=False))
        stuck = pending & self._pending
        self._pending = pending
        self._looked_up = {place: self._looked_up[place] for place in stuck & set(self._looked_up)}
        if new := stuck - set(self._looked_up):
            entries = _dump(entries=True).get("entries", [])
            for place in new:
                self._looked_up[place] = _entry(entries, place)
        found = [entry for entry in self._looked_up.values() if entry is not None]
        if not found:
            return None
        told = dict(min(found, key=itemgetter("began")))
        return {**told, "since_s": max(time.time() - told.pop("began"), 0.0)}

    def recorded(self) -> str:
        """The newest collectives as text, the newest last."""
        lines = []
        for entry in _dump(entries=True).get("entries", [])[-SHOWN:]:
            told = _told(entry)
            state = "ended" if entry.get("retired") else entry.get("state", "")
            sizes = ", ".join(map(str, entry.get("input_sizes", [])))
            lines.append(
                f"  {told['name']} #{told['number']} of group {told['group']}, {sizes}: {state}\n"
            )
        head = f"Newest {len(lines)} collectives of torch's flight recorder, the newest last:\n"
        return head + "".join(lines) if lines else ""


def _dump(*, entries: bool) -> dict[str, Any]:
    """What the recorder of this rank's backend holds; empty where it cannot be asked."""
    if not dist.is_initialized():
        return {}
    kind = "nccl" if dist.get_backend() == "nccl" else "fr"
    dump: Dump | None = getattr(c10d, f"_dump_{kind}_trace_json", None)
    if dump is None:
        return {}
    try:
        found = json.loads(dump(entries, False))
    except (RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _pending(found: Mapping[str, Any]) -> set[Place]:
    """The newest collectives that have not ended."""
    groups: Mapping[str, Mapping[str, str]] = found.get("pg_status", {})
    return {
        (group, numbers.get("last_enqueued_collective", ""))
        for group, numbers in groups.items()
        if numbers.get("last_enqueued_collective") != numbers.get("last_completed_collective")
    }


def _entry(entries: Sequence[Mapping[str, Any]], place: Place) -> dict[str, Any] | None:
    """The first collective of a group that has not ended: those behind it wait for it."""
    group = place[0]
    for entry in entries:
        if str(entry.get("pg_id")) == group and not entry.get("retired"):
            return _told(entry)
    return None


def _told(entry: Mapping[str, Any]) -> dict[str, Any]:
    group = str((entry.get("process_group") or ["?"])[0])
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    return {
        "name": str(entry.get("profiling_name", "?")).rpartition(":")[2],
        "number": number,
        "group": group,
        "ranks": _ranks(group),
        "began": float(entry.get("time_created_ns", 0)) / 1e9,
    }


def _ranks(group: str) -> list[int]:
    """Of the group of that name; empty where torch does not know it."""
    try:
        return list(dist.get_process_group_ranks(c10d._resolve_process_group(GroupName(group))))
    except (RuntimeError, ValueError, KeyError):
        return []
