"""The picture of a dataflow graph, as SVG and as text: calls in columns, each to the right of those
it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from slurmrl.graph import svg

DATASET: Final = "dataset"
LETTER: Final = 7.4
LINE: Final = 18
GAP_X: Final = 80
GAP_Y: Final = 26
MARGIN: Final = 20
NO_MODEL: Final = "#8c959f"
Place: TypeAlias = tuple[float, float, float, float]
"""x, y, width and height of a box."""


class Node(Protocol):
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
    def pre_hooks(self) -> tuple[str, ...]: ...
    @property
    def post_hooks(self) -> tuple[str, ...]: ...


def edges(calls: Sequence[Node], dataset_keys: Sequence[str]) -> list[tuple[str, str, list[str]]]:
    """From whom, to whom, and which keys; the dataset's first."""
    makers = dict.fromkeys(dataset_keys, DATASET)
    makers |= {key: call.name for call in calls for key in call.outputs}
    found: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        for key in call.inputs:
            found.setdefault((makers[key], call.name), []).append(key)
    return [(start, end, keys) for (start, end), keys in found.items()]


def levels(calls: Sequence[Node], dataset_keys: Sequence[str]) -> dict[str, int]:
    """The column of each call: one behind the last that it needs. Calls stand in an order in which
    each comes after those it needs."""
    column = {DATASET: 0}
    into = edges(calls, dataset_keys)
    for call in calls:
        needed = [column[start] for start, end, _ in into if end == call.name]
        column[call.name] = 1 + max(needed, default=0)
    return column


def picture(title: str, calls: Sequence[Node], dataset_keys: Sequence[str]) -> str:
    """SVG of a graph that was checked."""
    lines = {DATASET: [DATASET, *(f"→ {key}" for key in dataset_keys)]}
    lines |= {call.name: _lines(call) for call in calls}
    places = _places(levels(calls, dataset_keys), lines)
    colours = _colours(calls)
    parts = [svg.text(MARGIN, 26, title, "head")]
    for start, end, _ in edges(calls, dataset_keys):
        parts.append(_edge(places[start], places[end]))
    for name, place in places.items():
        x, y, width, height = place
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
                     'class="ground"/>')  # fmt: skip
        parts.append(svg.box(x, y, width, height, colours[name]))
        for index, words in enumerate(lines[name]):
            kind = "head" if index == 0 else "soft"
            parts.append(svg.text(x + 8, y + 16 + index * LINE, words, kind))
    width = max(x + wide for x, _, wide, _ in places.values()) + MARGIN
    height = max(y + high for _, y, _, high in places.values()) + MARGIN
    return svg.document(max(width, 300), height, title, parts)


def text(calls: Sequence[Node], dataset_keys: Sequence[str]) -> str:
    """One paragraph for each call, in their order."""
    makers = dict.fromkeys(dataset_keys, DATASET)
    makers |= {key: call.name for call in calls for key in call.outputs}
    lines = [f"{DATASET} -> {', '.join(dataset_keys)}"]
    for call in calls:
        lines += ["", f"{call.name}: {call.method} of {call.layout or call.role or 'no model'}"]
        lines += [f"  {hook}" for hook in call.pre_hooks]
        lines += [f"  <- {key} ({makers[key]})" for key in call.inputs]
        lines += [f"  -> {key}" for key in call.outputs]
        lines += [f"  then {hook}" for hook in call.post_hooks]
    return "\n".join(lines)


def _lines(call: Node) -> list[str]:
    what = f"{call.layout or call.role or 'no model'}: {call.method}"
    hooks = [f"before: {hook}" for hook in call.pre_hooks]
    hooks += [f"after: {hook}" for hook in call.post_hooks]
    keys = [*(f"← {key}" for key in call.inputs), *(f"→ {key}" for key in call.outputs)]
    return [call.name, what, *hooks, *keys]


def _colours(calls: Sequence[Node]) -> dict[str, str]:
    """By call, that of its model."""
    models = list(dict.fromkeys(call.layout or call.role for call in calls))
    named = [model for model in models if model is not None]
    of_model = {model: svg.COLOURS[i % len(svg.COLOURS)] for i, model in enumerate(named)}
    found = {call.name: of_model.get(call.layout or call.role or "", NO_MODEL) for call in calls}
    return {DATASET: NO_MODEL, **found}


def _places(columns: Mapping[str, int], lines: Mapping[str, Sequence[str]]) -> dict[str, Place]:
    places = {}
    x = float(MARGIN)
    for column in range(max(columns.values()) + 1):
        names = [name for name, at in columns.items() if at == column]
        width = max(LETTER * max(map(len, lines[name])) + 16 for name in names)
        y = 44.0
        for name in names:
            height = LINE * len(lines[name]) + 10.0
            places[name] = (x, y, width, height)
            y += height + GAP_Y
        x += width + GAP_X
    return places


def _edge(start: Place, end: Place) -> str:
    y1, y2 = start[1] + start[3] / 2, end[1] + end[3] / 2
    return svg.arrow(start[0] + start[2], y1, end[0], y2)
