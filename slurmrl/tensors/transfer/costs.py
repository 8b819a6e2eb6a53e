"""The costs of a planned move: bytes by link and rank, their minimum, memory, messages.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from slurmrl.tensors.layout import ITEM_BYTES
from slurmrl.tensors.transfer.plan import MovePlan, PlacedLayout, regions, wire_dtype


@dataclass(frozen=True)
class RankCosts:
    """The costs of one rank."""

    rank: int
    host: int
    sent_bytes: int
    received_bytes: int
    lacking_bytes: int
    """Bytes that the rank needs and lacks: the minimum that it can receive."""
    copied_bytes: int
    """Bytes that it copies from its own source to its own target."""
    staging_bytes: int
    """Maximum memory that it uses in addition to both models."""


@dataclass(frozen=True)
class LinkCosts:
    """The bytes from one rank to another."""

    sender: int
    receiver: int
    across_hosts: bool
    bytes: int


@dataclass(frozen=True)
class MoveCosts:
    ranks: tuple[RankCosts, ...]
    links: tuple[LinkCosts, ...]
    messages: int
    segments: int
    slots: int
    staging_limit_bytes: int

    def to_json(self) -> dict[str, Any]:
        across = sum(link.bytes for link in self.links if link.across_hosts)
        received = sum(rank.received_bytes for rank in self.ranks)
        lacking = sum(rank.lacking_bytes for rank in self.ranks)
        return {
            "bytes": {
                "same_rank": sum(rank.copied_bytes for rank in self.ranks),
                "same_host": received - across,
                "across_hosts": across,
            },
            "received_bytes": received,
            "lower_bound_bytes": lacking,
            "over_lower_bound": received / lacking if lacking else 1.0,
            "peak_extra_bytes": max((rank.staging_bytes for rank in self.ranks), default=0),
            **asdict(self),
        }


def costs(
    plan: MovePlan, source: PlacedLayout, target: PlacedLayout, hosts: Mapping[int, int]
) -> MoveCosts:
    """Return the costs of the plan of a move from ``source`` to ``target``.

    ``hosts`` gives the host of each global rank.
    """
    links, staging = plan.links(), plan.staging()
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for (sender, receiver), count in links.items():
        sent[sender] += count
        received[receiver] += count
    lacking = _lacking(source, target)
    ranks = tuple(
        RankCosts(
            rank,
            hosts[rank],
            sent[rank],
            received[rank],
            lacking.get(rank, 0),
            sum(cargo.bytes for cargo in plan.local.get(rank, ())),
            staging.get(rank, 0),
        )
        for rank in sorted({*source.ranks, *target.ranks})
    )
    return MoveCosts(
        ranks,
        tuple(
            LinkCosts(sender, receiver, hosts[sender] != hosts[receiver], count)
            for (sender, receiver), count in sorted(links.items())
        ),
        sum(sum(1 for _ in s.messages()) * len(list(pairwise(s.chain))) for s in plan.segments),
        len(plan.segments),
        plan.slots,
        plan.budget,
    )


def _lacking(source: PlacedLayout, target: PlacedLayout) -> dict[int, int]:
    """Return the bytes that each rank needs and does not hold, computed from the layouts."""
    found: dict[int, int] = defaultdict(int)
    for rank, count in _needs(source, target):
        found[rank] += count
    return dict(found)


def _needs(source: PlacedLayout, target: PlacedLayout) -> Iterator[tuple[int, int]]:
    for region in regions(source, target):
        specs = (side.layout.tensors[region.name] for side in (source, target))
        count = region.box.count * ITEM_BYTES[wire_dtype(region.name, *specs)]
        for rank in set(region.takers).difference(region.holders):
            yield rank, count
