"""The checked dataflow graph, whose edges follow from the keys that calls produce and consume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from slurmrl.errors import GraphError
from slurmrl.graph.call import DATASET_KEYS, Call
from slurmrl.registry import near

OWN_PACKAGE: Final = "slurmrl."


class CallNode(Protocol):
    """A call, in a graph or in a plan."""

    @property
    def name(self) -> str: ...
    @property
    def interface(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


class Graph:
    """A checked graph. Raises GraphError with all its errors: duplicate names and producers, inputs
    without a producer, cycles."""

    def __init__(self, calls: Sequence[Call], dataset_keys: Sequence[str]) -> None:
        self.calls = tuple(calls)
        self.dataset_keys = tuple(dataset_keys)
        problems = [*self._twice_named(), *self._twice_produced()]
        self.producers: dict[str, Call] = {key: call for call in calls for key in call.outputs}
        """The call that makes each key; the dataset's keys have none."""
        problems += self._missing()
        if problems:
            raise GraphError(*problems)
        self.order: tuple[Call, ...] = self._sort()
        """All calls in a topological order that otherwise preserves theirs."""

    def parents(self, call: Call) -> tuple[Call, ...]:
        """The calls that make this call's inputs, in the order of ``calls``."""
        needed = {self.producers[key].name for key in call.inputs if key in self.producers}
        return tuple(other for other in self.calls if other.name in needed)

    def children(self, call: Call) -> tuple[Call, ...]:
        """The calls that read this call's outputs, in the order of ``calls``."""
        made = set(call.outputs)
        return tuple(other for other in self.calls if made.intersection(other.inputs))

    def _twice_named(self) -> list[str]:
        names = [call.name for call in self.calls]
        twice = sorted({name for name in names if names.count(name) > 1})
        return [f"two calls are named '{name}'" for name in twice]

    def _twice_produced(self) -> list[str]:
        makers: dict[str, list[str]] = {key: ["the dataset"] for key in self.dataset_keys}
        for call in self.calls:
            for key in call.outputs:
                makers.setdefault(key, []).append(f"call '{call.name}'")
        return [
            f"key '{key}' has {len(names)} producers: {', '.join(names)}"
            for key, names in makers.items()
            if len(names) > 1
        ]

    def _missing(self) -> list[str]:
        known = sorted({*self.dataset_keys, *self.producers})
        return [
            f"call '{call.name}' reads key '{key}', which nothing produces; {near(key, known)}"
            for call in self.calls
            for key in call.inputs
            if key not in known
        ]

    def _sort(self) -> tuple[Call, ...]:
        """Kahn's algorithm; of several ready calls the first comes first."""
        waiting = {call.name: {parent.name for parent in self.parents(call)} for call in self.calls}
        order: list[Call] = []
        while len(order) < len(self.calls):
            ready = next((c for c in self.calls if c.name in waiting and not waiting[c.name]), None)
            if ready is None:
                raise GraphError(f"the calls form a cycle: {self._cycle(waiting)}")
            del waiting[ready.name]
            for needs in waiting.values():
                needs.discard(ready.name)
            order.append(ready)
        return tuple(order)

    @staticmethod
    def _cycle(waiting: dict[str, set[str]]) -> str:
        """One cycle among calls that all wait: follow their needs until a name repeats."""
        path = [next(iter(waiting))]
        while True:
            needed = min(waiting[path[-1]])
            if needed in path:
                cycle = [*path[path.index(needed) :], needed]
                return " -> ".join(reversed(cycle))
            path.append(needed)


def unread(calls: Sequence[CallNode], dataset_type: str, *, evaluation: bool = False) -> list[str]:
    """Warnings about keys of the user's own calls that no call reads, and about built-in calls and
    a dataset of which none is read: what else these make depends on neither algorithm nor settings.
    In an evaluation, the last calls' outputs are its results and give no warning."""
    read = {key for call in calls for key in call.inputs}
    keys = DATASET_KEYS[dataset_type]
    unused = keys if read.isdisjoint(keys) else ()
    warnings = [f"'{key}' of the dataset is never read" for key in unused]
    for call in calls:
        used = not read.isdisjoint(call.outputs)
        if (used and call.interface.startswith(OWN_PACKAGE)) or (evaluation and not used):
            continue
        warnings += [
            f"'{key}' of call '{call.name}' is never read"
            for key in call.outputs
            if key not in read
        ]
    return warnings
