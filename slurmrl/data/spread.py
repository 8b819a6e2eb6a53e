"""The spread of a batch's items over ranks, and what has to be delivered between two spreads.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The items of a batch that each data-parallel rank of a layout works on."""

    parts: tuple[tuple[int, ...], ...]
    """Indices of items in the batch, ascending, of each data-parallel rank."""
    members: tuple[tuple[int, ...], ...]
    """Global ranks that work on each part. The first one speaks for them."""

    def part_of(self, rank: int) -> int | None:
        """The number of a global rank's part; None for a rank outside the layout."""
        for number, ranks in enumerate(self.members):
            if rank in ranks:
                return number
        return None

    def speaks(self, rank: int) -> bool:
        return any(rank == ranks[0] for ranks in self.members)


@dataclass(frozen=True)
class Delivery:
    """Items that the speaker of one part gets from the speaker of another."""

    sender: int
    receiver: int
    items: tuple[int, ...]


def deliveries(source: Spread, target: Spread) -> Iterator[Delivery]:
    """All deliveries, in an order that every rank computes alike. Some stay on one rank. A part
    without items gets a delivery without items, which tells it the types of the keys."""
    speakers = [members[0] for members in source.members]
    for needs, members in zip(target.parts, target.members, strict=True):
        receiver = members[0]
        if not needs:
            yield Delivery(receiver if receiver in speakers else speakers[0], receiver, ())
            continue
        wanted = set(needs)
        for part, sender in zip(source.parts, speakers, strict=True):
            items = tuple(item for item in part if item in wanted)
            if items:
                yield Delivery(sender, receiver, items)


def joined(spreads: Sequence[Spread], items: Sequence[tuple[int, int]]) -> Spread:
    """The spread of a batch whose items come from batches with ``spreads`` of one layout and stay
    where they are. ``items`` are (number of the batch, place in it)."""
    parts: list[list[int]] = [[] for _ in spreads[0].parts]
    owners = [
        {place: part for part, places in enumerate(spread.parts) for place in places}
        for spread in spreads
    ]
    for item, (batch, place) in enumerate(items):
        parts[owners[batch][place]].append(item)
    return Spread(tuple(map(tuple, parts)), spreads[0].members)
