"""The dataflow graph: an algorithm's calls with their models, keys and results.

The keys that calls produce and read determine the edges. This module also makes the JSON values and
the document that show the graph of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from slurmrl.display.terminal import Document, Flow, Legend, Node, NodeLine
from slurmrl.errors import GraphError
from slurmrl.registry import near

Head: TypeAlias = Literal["lm", "value"]
DATASET_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "prompt": ("prompt_ids",),
    "prompt_answer": ("input_ids", "prompt_mask"),
    "preference": ("input_ids", "prompt_mask"),
    "kto": ("input_ids", "prompt_mask", "desirable"),
    "messages": ("input_ids", "prompt_mask"),
}
"""Mapping from a type of dataset to the keys that it feeds into the graph."""


REWARD_MODEL: Final = "reward_model"
"""Name of the role that scores completions for the reward ``model``."""


class Method(StrEnum):
    """The operation of a call on its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    FILTER = "filter"
    """The call filters items: later calls get only the accepted items."""
    RECORD = "record"
    """The call writes a line about each item to the results of the trial."""


@dataclass(frozen=True)
class Call:
    """One call of an algorithm's step.

    ``interface`` is the ``module:Class`` that implements ``method``. A call without a role, such as
    a rule-based reward, needs no model.
    """

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the call reports; a user's own reward may report more."""


Record: TypeAlias = Mapping[str, Any]
"""A line about one item in the trial's results, as JSON values."""


class Measure(StrEnum):
    """The way to compute one number from the scores of all items."""

    MEAN = "mean"
    PART_MEAN = "part_mean"
    """Mean over the items that have the score."""
    RATE = "rate"
    """Mean of values between 0 and 1."""
    REWARD = "reward"
    """Mean of rewards. The mean is a rate if all rewards are 0 or 1."""
    LOSS = "loss"
    """Mean of -log p over all ``tokens`` of answers. The scores are the items' ``logprob``."""
    PERPLEXITY = "perplexity"
    """Exponential of the loss."""

    def score(self, metric: str) -> str:
        """Return the name of the score from which a metric is computed."""
        return "logprob" if self in (Measure.LOSS, Measure.PERPLEXITY) else metric


class Estimate(NamedTuple):
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """The summary of all lines of a trial's results."""

    estimates: Mapping[str, Estimate]
    """Mapping from metrics to estimates."""
    scores: Sequence[Record]
    """Short line about each item, in the order of the results."""

    @property
    def metrics(self) -> dict[str, float]:
        """Mapping from a metric's name to the value of an estimate or the end of its interval."""
        metrics: dict[str, float] = {}
        for name, (value, low, high) in self.estimates.items():
            metrics |= {name: value, f"{name}/low": low, f"{name}/high": high}
        return metrics


@dataclass(frozen=True)
class Refill:
    """The way in which a step fills its batch if a filter drops items.

    Rounds of candidate items go through the calls up to the filter until the batch is full.
    """

    rounds: int = 1
    """Maximum number of rounds in a step."""
    candidates: int | None = None
    """Number of items in a round; None means the size of a batch."""
    complete: bool = False
    """Whether a batch that is not full after all rounds is an error."""


@dataclass(frozen=True)
class RoleUse:
    """The use of a role's model by an algorithm.

    ``head`` is the layer on top of the decoder, for tokens (``lm``) or a scalar (``value``).
    """

    role: str
    trained: bool
    head: Head = "lm"


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
    """A checked graph.

    The constructor raises GraphError with all errors: duplicate names and producers, inputs without
    a producer, cycles.
    """

    def __init__(self, calls: Sequence[Call], dataset_keys: Sequence[str]) -> None:
        self.calls = tuple(calls)
        self.dataset_keys = tuple(dataset_keys)
        problems = [*self._twice_named(), *self._twice_produced()]
        self.producers: dict[str, Call] = {key: call for call in calls for key in call.outputs}
        """Call that makes each key; keys of the dataset have none."""
        problems += self._missing()
        if problems:
            raise GraphError(*problems)
        self.order: tuple[Call, ...] = self._sort()
        """All calls in a topological order, which keeps the order of ``calls`` where possible."""

    def parents(self, call: Call) -> tuple[Call, ...]:
        """Return the calls that make this call's inputs, in the order of ``calls``."""
        needed = {self.producers[key].name for key in call.inputs if key in self.producers}
        return tuple(other for other in self.calls if other.name in needed)

    def children(self, call: Call) -> tuple[Call, ...]:
        """Return the calls that read this call's outputs, in the order of ``calls``."""
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
        """Return the calls sorted by Kahn's algorithm; ready calls keep the order of ``calls``."""
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
        """Return a cycle of waiting calls. Follow needed calls until a name repeats."""
        path = [next(iter(waiting))]
        while True:
            needed = min(waiting[path[-1]])
            if needed in path:
                cycle = [*path[path.index(needed) :], needed]
                return " -> ".join(reversed(cycle))
            path.append(needed)


def unread(calls: Sequence[CallNode], dataset_type: str, *, evaluation: bool = False) -> list[str]:
    """Return warnings about keys that no call reads.

    Every unread key of the user's own calls gives a warning. Built-in calls and datasets always
    make all their keys, so they give a warning only if no key is read. In an evaluation, the last
    calls' outputs are its results and give no warning.
    """
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


DATASET: Final = "dataset"


class PlannedCall(CallNode, Protocol):
    """A call of a plan."""

    @property
    def role(self) -> str | None: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def method(self) -> str: ...
    @property
    def pre_hooks(self) -> Sequence[object]:
        """Hooks before the call; ``str()`` describes a hook."""
        ...

    @property
    def post_hooks(self) -> Sequence[object]: ...


def values(
    calls: Sequence[PlannedCall],
    dataset_keys: Sequence[str],
    models: Mapping[str, str],
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the graph that ``slurmrl plan --graph --json`` prints.

    ``models`` maps the names of the plan's models to their layouts.
    """
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
    """Return the edges with their keys; ``from`` is a call or the dataset."""
    makers = _makers(dataset_keys, [(call.name, call.outputs) for call in calls])
    edges: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        for key in call.inputs:
            edges.setdefault((makers[key], call.name), []).append(key)
    return [{"from": start, "to": end, "keys": keys} for (start, end), keys in edges.items()]


def _makers(
    dataset_keys: Sequence[str], outputs: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, str]:
    """Return the name of the call that makes each key; `DATASET` for keys of the dataset."""
    makers = dict.fromkeys(dataset_keys, DATASET)
    return makers | {key: name for name, keys in outputs for key in keys}


def document(title: str, graph: Mapping[str, Any]) -> Document:
    """Return the document that shows the graph in `values`.

    The legend lists all models, so that each model has the same color as in the plan.
    """
    calls = graph["calls"]
    makers = _makers(graph["dataset"], [(call["name"], call["outputs"]) for call in calls])
    levels = _levels(graph)
    nodes = [Node(DATASET, 0, [NodeLine(key, "out") for key in graph["dataset"]])]
    for call in calls:
        model = call["layout"] or call["role"]
        description = f"{call['method']} of {model}" if model else f"{call['method']}, no model"
        lines = list(_lines(call, makers))
        nodes.append(Node(call["name"], levels[call["name"]], lines, description, model))
    arrows = [(edge["from"], edge["to"]) for edge in graph["edges"]]
    return Document(title, [Legend(graph["models"]), Flow(nodes, arrows)])


def _lines(call: Mapping[str, Any], makers: Mapping[str, str]) -> Iterator[NodeLine]:
    for hook in call["pre_hooks"]:
        yield NodeLine(f"before: {hook}")
    for key in call["inputs"]:
        yield NodeLine(key, "in", makers[key])
    for key in call["outputs"]:
        yield NodeLine(key, "out")
    for hook in call["post_hooks"]:
        yield NodeLine(f"after: {hook}")


def _levels(graph: Mapping[str, Any]) -> dict[str, int]:
    """Return the length of the longest path from the dataset to each call.

    The calls must be in topological order.
    """
    levels = {DATASET: 0}
    for call in graph["calls"]:
        parents = [edge["from"] for edge in graph["edges"] if edge["to"] == call["name"]]
        levels[call["name"]] = 1 + max((levels[name] for name in parents), default=0)
    return levels
