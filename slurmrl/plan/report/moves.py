"""The costs of a plan's moves, as blocks of a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from slurmrl.display.document import Block, Lines, Table
from slurmrl.plan.estimates.hardware import binary_size

SHOWN: Final = 16
"""Ranks that a table lists; the JSON has all of them."""
PARTS: Final = ("sent", "received", "lacking", "copied", "staging")


def blocks_of(moves: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    if not moves:
        yield Lines("moves: none, because every call runs on the layout of its model")
    for move in moves:
        yield _summary(move)
        yield _links(move)
        yield _ranks(move)


def _summary(move: Mapping[str, Any]) -> Lines:
    received, least = move["received_bytes"], move["lower_bound_bytes"]
    extra, limit = move["peak_extra_bytes"], move["staging_limit_bytes"]
    return Lines(
        f"move {move['source']} -> {move['target']}, {move['when']} {', '.join(move['calls'])}:",
        [
            f"{binary_size(received)} received, {move['over_lower_bound']:.4f} times the lower "
            f"bound of {binary_size(least)}",
            f"{move['messages']} messages, {move['segments']} segments, {move['slots']} slots",
            f"extra memory of a rank: at most {binary_size(extra)}, allowed {binary_size(limit)}",
        ],
    )


def _links(move: Mapping[str, Any]) -> Table:
    """Totals of each kind of link, and the most that one of them carries."""
    rows = []
    links = move["links"]
    for kind, across in (("same host", False), ("across hosts", True)):
        each = [link["bytes"] for link in links if link["across_hosts"] == across]
        total = move["bytes"][kind.replace(" ", "_")]
        rows.append([kind, str(len(each)), *map(binary_size, (total, max(each, default=0)))])
    copied = move["bytes"]["same_rank"]
    own = [rank["copied_bytes"] for rank in move["ranks"] if rank["copied_bytes"]]
    rows.insert(0, ["same rank", str(len(own)), *map(binary_size, (copied, max(own, default=0)))])
    return Table(("LINKS", "NUMBER", "BYTES", "LARGEST"), rows)


def _ranks(move: Mapping[str, Any]) -> Table:
    """All ranks, or those that send and receive most."""
    ranks = move["ranks"]
    busiest = sorted(ranks, key=lambda rank: -max(rank["sent_bytes"], rank["received_bytes"]))
    shown = ranks if len(ranks) <= SHOWN else busiest[:SHOWN]
    rows = [_rank(str(rank["rank"]), rank) for rank in shown]
    rows.append(_rank("largest", {k: max(r[k] for r in ranks) for k in ranks[0]}))
    rows.append(_rank("average", {k: sum(r[k] for r in ranks) // len(ranks) for k in ranks[0]}))
    hidden = len(ranks) - len(shown)
    note = f"{hidden} less busy ranks are left out; --json lists them" if hidden else ""
    return Table(("RANK", *(part.upper() for part in PARTS)), rows, note=note)


def _rank(label: str, costs: Mapping[str, int]) -> list[str]:
    return [label, *(binary_size(costs[f"{part}_bytes"]) for part in PARTS)]
