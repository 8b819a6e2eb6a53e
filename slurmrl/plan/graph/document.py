"""The dataflow graph of a plan as JSON values and as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from slurmrl.display.document import Document, Flow, Legend, Node, NodeLine

DATASET: Final = "dataset"


class PlannedCall(Protocol):
    """A call of a plan."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str | None: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def method(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def pre_hooks(self) -> Sequence[object]:
        """Their ``str`` describes them."""
        ...

    @property
    def post_hooks(self) -> Sequence[object]: ...


def values(
    calls: Sequence[PlannedCall],
    dataset_keys: Sequence[str],
    models: Mapping[str, str],
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """The graph as ``slurmrl graph --json`` prints it. ``models`` maps the names of the plan's
    models to their layouts."""
    return {
        "models": dict(models),
        "dataset": list(dataset_keys),
        "calls": [_call(call) for call in calls],
        "edges": _edges(calls, dataset_keys),
        "warnings": list(warnings),
    }


def _call(call: PlannedCall) -> dict[str, Any]:
    return {
        "name": call.name,
        "role": call.role,
        "method": str(call.method),
        "inputs": list(call.inputs),
        "outputs": list(call.outputs),
        "layout": call.layout,
        "pre_hooks": list(map(str, call.pre_hooks)),
        "post_hooks": list(map(str, call.post_hooks)),
    }


def _edges(calls: Sequence[PlannedCall], dataset_keys: Sequence[str]) -> list[dict[str, Any]]:
    """The keys that pass from one call to another; those of the dataset come first."""
    makers = _makers(dataset_keys, [(call.name, call.outputs) for call in calls])
    edges: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        for key in call.inputs:
            edges.setdefault((makers[key], call.name), []).append(key)
    return [{"from": start, "to": end, "keys": keys} for (start, end), keys in edges.items()]


def _makers(
    dataset_keys: Sequence[str], outputs: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, str]:
    """The call that makes each key, or the dataset."""
    makers = dict.fromkeys(dataset_keys, DATASET)
    return makers | {key: name for name, keys in outputs for key in keys}


def document(title: str, graph: Mapping[str, Any]) -> Document:
    """The document of a graph's values. Its legend has all models, so that each has the colour that
    it has in the plan."""
    calls = graph["calls"]
    makers = _makers(graph["dataset"], [(call["name"], call["outputs"]) for call in calls])
    levels = _levels(graph)
    nodes = [Node(DATASET, 0, [NodeLine(key, "out") for key in graph["dataset"]])]
    for call in calls:
        model = call["layout"] or call["role"]
        description = f"{call['method']} of {model or 'no model'}"
        lines = list(_lines(call, makers))
        nodes.append(Node(call["name"], levels[call["name"]], lines, description, model))
    arrows = [(edge["from"], edge["to"]) for edge in graph["edges"]]
    return Document(title, [Legend(graph["models"]), Flow(nodes, arrows)])


def _lines(call: Mapping[str, Any], makers: Mapping[str, str]) -> Iterator[NodeLine]:
    for hook in call["pre_hooks"]:
        yield NodeLine(f"before: {hook}")
    for key in call["inputs"]:
        yield NodeLine(f"{key} ({makers[key]})", "in")
    for key in call["outputs"]:
        yield NodeLine(key, "out")
    for hook in call["post_hooks"]:
        yield NodeLine(f"after: {hook}")


def _levels(graph: Mapping[str, Any]) -> dict[str, int]:
    """The longest path from the dataset to each call. (A plan's calls are in topological order.)"""
    levels = {DATASET: 0}
    for call in graph["calls"]:
        parents = [edge["from"] for edge in graph["edges"] if edge["to"] == call["name"]]
        levels[call["name"]] = 1 + max((levels[name] for name in parents), default=0)
    return levels
