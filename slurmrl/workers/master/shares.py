"""How items are dealt to rollout tasks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping


def dealt(loads: Mapping[str, int], rooms: Mapping[str, int], share: int) -> Counter[str]:
    """Items for each task, one after the other to the one with the least: none gets more than its
    ``share`` with its load, nor any that exceeds its room, which counts those of all."""
    queue = [(load, name) for name, load in loads.items()]
    heapq.heapify(queue)
    granted: Counter[str] = Counter()
    for number in range(max(rooms.values(), default=0)):
        while queue and (queue[0][0] >= share or number >= rooms[queue[0][1]]):
            heapq.heappop(queue)
        if not queue:
            break
        load, name = queue[0]
        granted[name] += 1
        heapq.heapreplace(queue, (load + 1, name))
    return granted
