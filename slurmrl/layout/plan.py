"""The plan of copies that turns one layout's data into another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slurmrl.errors import LayoutError
from slurmrl.layout.box import Box, Index, cover
from slurmrl.layout.layout import Layout
from slurmrl.layout.shard import Shard


@dataclass(frozen=True, slots=True)
class Site:
    """A strided box of one rank's storage; offset and strides in elements."""

    rank: int
    storage: str
    offset: int
    strides: Index


@dataclass(frozen=True, slots=True)
class Copy:
    """Box ``box`` of tensor ``name`` goes from one site to another."""

    name: str
    box: Box
    source: Site
    target: Site


def plan(source: Layout, target: Layout, ranks: Iterable[int] | None = None) -> list[Copy]:
    """Copies that fill every shard of ``target`` (or only those of ``ranks``), each element once.

    A rank reads its own replica if it has one, otherwise the one on the next rank that has it,
    which spreads readers over the replicas. Raises LayoutError if a tensor is unknown, differs in
    shape, or is incomplete.
    """
    holders = source.by_name()
    copies: list[Copy] = []
    for rank in range(target.ranks) if ranks is None else ranks:
        for shard in target.held_by(rank):
            _check_same(shard.name, source, target)
            near = sorted(holders[shard.name], key=lambda h: (h[0] - rank) % source.ranks)
            copies += fill(rank, shard, near)
    return copies


def fill(rank: int, shard: Shard, holders: Sequence[tuple[int, Shard]]) -> Iterator[Copy]:
    """Copies into one shard of ``rank`` from (rank, shard) holders, the first ones preferred."""
    taken, rest = cover(shard.box, (held.box for _, held in holders))
    if rest:
        raise LayoutError(f"no rank of the source holds {rest[0]} of tensor '{shard.name}'")
    for number, box in taken:
        source, held = holders[number]
        yield Copy(shard.name, box, _site(source, held, box), _site(rank, shard, box))


def _site(rank: int, shard: Shard, box: Box) -> Site:
    return Site(rank, shard.storage, shard.offset_of(box), shard.strides)


def _check_same(name: str, source: Layout, target: Layout) -> None:
    if name not in source.tensors:
        raise LayoutError(f"the source has no tensor '{name}'")
    ours, theirs = target.tensors[name].shape, source.tensors[name].shape
    if ours != theirs:
        raise LayoutError(
            f"tensor '{name}' has shape {theirs} in the source and {ours} in the target"
        )
