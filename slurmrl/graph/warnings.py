"""What is odd about a graph, but not wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slurmrl.graph.dataset import DATASET_KEYS


class CallNode(Protocol):
    """A call, in a graph or in a plan."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def unread(calls: Sequence[CallNode], dataset_type: str, *, evaluation: bool = False) -> list[str]:
    """Keys that nobody reads, with who makes them. An evaluation's results are the keys of the
    calls that nobody comes after, and no oddity."""
    read = {key for call in calls for key in call.inputs}
    found = [
        f"'{key}' of the dataset is read by nobody"
        for key in DATASET_KEYS[dataset_type]
        if key not in read
    ]
    for call in calls:
        if evaluation and not read.intersection(call.outputs):
            continue
        for key in call.outputs:
            if key not in read:
                found.append(f"'{key}' of call '{call.name}' is read by nobody")
    return found
