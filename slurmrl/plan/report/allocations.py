"""The explanation of an allocation string as a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slurmrl.display.document import Block, Document, Grid, GridRow, Lines, Table
from slurmrl.plan.resolve.allocation_mode import USUAL_GPUS_PER_HOST
from slurmrl.tensors.parallel.topology import ProcessTopology

AXIS_LETTERS: Final = {"pp": "p", "dp": "d", "cp": "c", "tp": "t"}
"""The axes of a model's ranks; neighbours differ in the last one that is split."""


def document(explained: Mapping[str, Any]) -> Document:
    """The document of `explain`: the sizes of each allocation, and where each rank lies."""
    parts = explained.get("components", [explained])
    names = [_name(part, number, parts) for number, part in enumerate(parts)]
    blocks: list[Block] = [_sizes(part) for part in parts]
    if "write_instead" in explained:  # what shares GPUs is not known
        blocks += [_grid({name: part}) for name, part in zip(names, parts, strict=True)]
        blocks.append(Lines("write instead:", explained["write_instead"]))
    else:
        blocks.append(_grid(dict(zip(names, parts, strict=True))))
        if len(parts) > 1:
            blocks.append(Lines(f"together: {explained['world_size']} ranks"))
    return Document("", blocks)


def written(rank: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """A rank's coordinates on the axes that are split: ``d0 t1``."""
    split = [axis for axis in AXIS_LETTERS if sizes[axis] > 1]
    return " ".join(f"{AXIS_LETTERS[axis]}{rank[axis]}" for axis in split) or "all"


def _name(part: Mapping[str, Any], number: int, parts: Sequence[Mapping[str, Any]]) -> str:
    name = part["name"] or part["backend"]
    same = [one for one in parts if (one["name"] or one["backend"]) == name]
    return f"{name} {number}" if len(same) > 1 else str(name)


def _sizes(explained: Mapping[str, Any]) -> Table:
    title = f"{explained['string']}: {explained['world_size']} ranks"
    halves = [half for half in ("attn", "ffn") if half in explained]
    if halves:
        axes = ["dp", "pp", "tp", "cp", "ep", "world_size"]
        rows = [[half, *(str(explained[half].get(axis, "-")) for axis in axes)] for half in halves]
        return Table(["HALF", *map(str.upper, axes)], rows, title)
    axes = ["dp", "tp", "pp", "cp", "ep", "etp", "edp"]
    return Table([*map(str.upper, axes)], [[str(explained[axis]) for axis in axes]], title)


def _grid(parts: Mapping[str, Mapping[str, Any]]) -> Grid:
    """The ranks of allocations on as many hosts as they need."""
    gpus = max(part.get("first_rank", 0) + part["world_size"] for part in parts.values())
    hosts = -(-gpus // USUAL_GPUS_PER_HOST)
    cells: list[dict[str, str]] = [{} for _ in range(min(gpus, USUAL_GPUS_PER_HOST) * hosts)]
    for name, part in parts.items():
        for rank, words in enumerate(_coordinates(part), start=part.get("first_rank", 0)):
            cells[rank][name] = words
    rows = [
        GridRow(str(host), cells[first : first + USUAL_GPUS_PER_HOST])
        for host, first in enumerate(range(0, len(cells), USUAL_GPUS_PER_HOST))
    ]
    title = f"{' and '.join(parts)}, if a host has {USUAL_GPUS_PER_HOST} GPUs:"
    return Grid(title, "host", "GPU", "model", rows)


def _coordinates(part: Mapping[str, Any]) -> Iterator[str]:
    grid = ProcessTopology(tuple(AXIS_LETTERS), [part[axis] for axis in AXIS_LETTERS])
    for rank in range(grid.world_size):
        yield written(grid.coordinates(rank), part)
