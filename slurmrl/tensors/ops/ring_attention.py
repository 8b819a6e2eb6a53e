"""Causal attention over packed sequences whose tokens are spread over ranks (Liu et al. 2023).

Each rank keeps its queries. From the other ranks, one after another, a rank receives the keys and
values to which its queries attend. The rank merges the partial results by their normalizers. The
next keys are transferred while the rank computes. The backward pass sends the keys again, and
returns the gradients of the keys to their ranks.

The packed tokens are cut into 2 R chunks. Rank r has the r-th chunk and the r-th chunk from the end
(zigzag). All ranks therefore have a similar number of pairs of queries and keys. At most one
sequence crosses a boundary of two chunks. A later chunk therefore sees only the last keys of a
chunk, and all queries that see these keys come after them.

Shapes: R ranks, T packed tokens, S sequences, N tokens of this rank, Hq query heads, Hkv key and
value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.attention import (
    Packing,
    empty_results,
    flash_fits,
    for_each_query_head,
    store,
)
from slurmrl.tensors.ops.partial_attention import (
    Band,
    Ragged,
    attend,
    band_attention,
    band_gradients,
    flash,
    flash_gradients,
    gradients,
    merged,
    sink_gradient,
    with_sinks,
)

Results = tuple[Tensor, Tensor]
"""A result [L, Hq, D] and its normalizers [L, Hq]."""
_group: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)["_resolve_process_group"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Sequence[int],
    part: int,
    group: dist.ProcessGroup,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal softmax attention [N, Hq, D] within each sequence. Collective.

    q [N, Hq, D]; k, v [N, Hkv, D], where Hkv divides Hq: this rank's tokens in the order of
    `zigzag`. ``bounds`` [S+1] are the first places of the packed sequences, and T. ``part`` is the
    maximum number of tokens of a rank. Scores are multiplied by ``scale``. With a ``window``, a
    query attends to the last ``window`` tokens, its own included. ``sinks`` [Hq] are additional
    scores without values. Selective activation checkpointing keeps the result.
    """
    out, _ = torch.ops.slurmrl.ring_attention(
        q, k, v, sinks, list(bounds), part, group.group_name, scale, window
    )
    result: Tensor = out
    return result


class _Transfer:
    """A running transfer: this rank sends rows to one rank and receives rows from another."""

    def __init__(
        self, rows: Tensor, taker: int, giver: int, received: int, group: dist.ProcessGroup
    ) -> None:
        sent, came = [0] * group.size(), [0] * group.size()
        sent[taker], came[giver] = rows.shape[0], received
        self._rows = rows.contiguous()
        self._came = rows.new_empty((received, *rows.shape[1:]))
        self._work = dist.all_to_all_single(
            self._came, self._rows, came, sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        return self._came


def _passed_on(
    hops: Sequence[Hop], pairs: Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[Hop, Tensor]]:
    """Start the first transfer; return an iterator of hops and received rows [rows, 2 Hkv, D].

    A row has keys and values. The next transfer runs while the caller computes.
    """

    def start(hop: Hop) -> _Transfer:
        rows = torch.cat([pairs[rows] for rows in hop.sent])
        return _Transfer(rows, hop.taker, hop.giver, hop.received, group)

    def received(moving: _Transfer) -> Iterator[tuple[Hop, Tensor]]:
        for index, hop in enumerate(hops):
            came = moving.wait()
            if index + 1 < len(hops):
                moving = start(hops[index + 1])
            yield hop, came

    return received(start(hops[0])) if hops else iter(())


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bounds: Sequence[int],
    part: int,
    group_name: str,
    scale: float,
    window: int | None,
) -> Results:
    group = _group(group_name)
    plan = schedule(tuple(bounds), part, group.size(), group.rank(), window)
    own = torch.cat((k, v), 1)
    coming = _passed_on(plan.hops, own, group)
    out, normalizers = own_results(q, k, v, plan.own, scale, window)
    whole = out.to(wide(q.dtype))
    _merge(whole, normalizers, plan.parts, q, own, scale, window)
    for hop, pairs in coming:
        _merge(whole, normalizers, hop.parts, q, pairs, scale, window)
    if sinks is not None:
        whole, normalizers = with_sinks((whole, normalizers), sinks)
    return whole.to(q.dtype), normalizers


def _merge(
    out: Tensor,
    normalizers: Tensor,
    parts: Sequence[KeyBlock],
    q: Tensor,
    pairs: Tensor,
    scale: float,
    window: int | None,
) -> None:
    for rows, places, offset in parts:
        band = Band(offset, window)
        seen = _part_results(q[rows], pairs[places], scale, band)
        out[rows], normalizers[rows] = merged((out[rows], normalizers[rows]), seen)


def own_results(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, window: int | None
) -> Results:
    """Return the results over the keys of each token's own chunk."""
    if flash_fits(q):
        return flash(q, k, v, _own_chunk(q, packing, window), scale)
    results = empty_results(q)
    k, v = for_each_query_head(q, k, v)
    for *into, q_run, k_run, v_run in packing.batches(*results, q, k, v):
        store(into, _results((q_run, k_run, v_run), scale, Band(0, window)))
    return results


def _part_results(q: Tensor, pairs: Tensor, scale: float, band: Band) -> Results:
    k, v = pairs.chunk(2, 1)
    if flash_fits(q):
        return flash(q, k, v, seen_part(q, k, band), scale)
    k, v = for_each_query_head(q, k, v)
    out, normalizers = _results([x.transpose(0, 1)[None] for x in (q, k, v)], scale, band)
    return out[0].transpose(0, 1), normalizers[0].transpose(0, 1)


def _results(inputs: Sequence[Tensor], scale: float, band: Band) -> Results:
    """Return the results [S, H, L, D] and [S, H, L] of q [S, H, L, D] and k, v [S, H, K, D]."""
    q, k, v = inputs
    if q.is_cuda or band.cuts(q.shape[2]):
        return band_attention(q, k, v, scale, band)
    return attend(q, k, v, scale, causal=band.offset == 0)


def setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """Save inputs and results for the backward pass; ``rest`` has the inputs that follow sinks."""
    q, k, v, sinks, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    bounds, part, group_name, scale, window = ctx.rest
    nothing = (None,) * len(ctx.rest)
    if grad is None:
        return (None, None, None, None, *nothing)
    q, k, v, sinks, out, normalizers = ctx.saved_tensors
    group = _group(group_name)
    plan = schedule(tuple(bounds), part, group.size(), group.rank(), window)
    known = (grad.contiguous(), q, out, normalizers)
    own = torch.cat((k, v), 1)
    coming = _passed_on(plan.hops, own, group)
    of_q, of_pairs = own_gradients(known, k, v, plan.own, scale, window)
    _add(of_q, of_pairs, plan.parts, known, own, scale, window)
    returning: list[tuple[Hop, _Transfer]] = []
    for hop, pairs in coming:
        theirs = torch.zeros_like(pairs, dtype=wide(pairs.dtype))
        _add(of_q, theirs, hop.parts, known, pairs, scale, window)
        _add_returned(of_pairs, returning)
        rows = sum(rows.stop - rows.start for rows in hop.sent)
        returning.append((hop, _Transfer(theirs, hop.giver, hop.taker, rows, group)))
    _add_returned(of_pairs, returning)
    of_k, of_v = of_pairs.to(k.dtype).chunk(2, 1)
    of_sinks = None if sinks is None else sink_gradient(known, sinks)
    return (of_q.to(q.dtype), of_k, of_v, of_sinks, *nothing)


def _add_returned(of_pairs: Tensor, returning: list[tuple[Hop, _Transfer]]) -> None:
    """Add the gradients of this rank's keys and values that other ranks have computed."""
    for hop, transfer in returning:
        sizes = [rows.stop - rows.start for rows in hop.sent]
        for rows, found in zip(hop.sent, transfer.wait().split_with_sizes(sizes), strict=True):
            of_pairs[rows] += found
    returning.clear()


def _add(
    of_q: Tensor,
    of_pairs: Tensor,
    parts: Sequence[KeyBlock],
    known: tuple[Tensor, ...],
    pairs: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Add the gradients of parts; ``known`` has gradient, queries, result and normalizers."""
    for rows, places, offset in parts:
        own = tuple(x[rows] for x in known)
        band = Band(offset, window)
        found = _part_gradients(own, pairs[places], scale, band)
        of_q[rows] += found[0]
        of_pairs[places] += torch.cat(found[1:], 1)


def own_gradients(
    known: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries [N, Hq, D], and of keys and values [N, 2 Hkv, D]."""
    q = known[1]
    if flash_fits(q):
        chunk = _own_chunk(q, packing, window)
        found = [x.to(wide(x.dtype)) for x in flash_gradients(known, k, v, chunk, scale)]
        return found[0], torch.cat(found[1:], 1)
    keys, values = for_each_query_head(q, k, v)
    found = [torch.empty_like(x, dtype=wide(x.dtype)) for x in (q, keys, values)]
    for of_q, of_k, of_v, *run in packing.batches(*found, *known, keys, values):
        store((of_q, of_k, of_v), _gradients(run, scale, Band(0, window)))
    return found[0], torch.cat([_summed(x, k.shape[1]) for x in found[1:]], 1)


def _part_gradients(
    known: tuple[Tensor, ...], pairs: Tensor, scale: float, band: Band
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries [L, Hq, D], keys and values [K, Hkv, D]."""
    k, v = pairs.chunk(2, 1)
    q = known[1]
    if flash_fits(q):
        return flash_gradients(known, k, v, seen_part(q, k, band), scale)
    run = [x.transpose(0, 1)[None] for x in (*known, *for_each_query_head(q, k, v))]
    of_q, *of_pair = (x[0].transpose(0, 1) for x in _gradients(run, scale, band))
    of_k, of_v = (_summed(x.to(wide(x.dtype)), k.shape[1]) for x in of_pair)
    return of_q, of_k, of_v


def _gradients(inputs: Sequence[Tensor], scale: float, band: Band) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `_results` from gradient, q, result, normalizers, k and v."""
    grad, q, out, norm, k, v = inputs
    if q.is_cuda or band.cuts(q.shape[2]):
        return band_gradients(grad, q, k, v, out, norm, scale, band)
    return gradients(grad, q, k, v, out, norm, scale, causal=band.offset == 0)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Return x [K, Hq, D] summed over the query heads that share a key head: [K, Hkv, D]."""
    if x.shape[1] == heads:
        return x
    return x.view(x.shape[0], heads, x.shape[1] // heads, x.shape[2]).sum(2)


def _own_chunk(q: Tensor, packing: Packing, window: int | None) -> Ragged:
    """Return the boundaries for attention within each chunk of this rank."""
    cu, most = packing.cu_seqlens_on(q.device), packing.max_len
    return Ragged(cu, cu, most, most, -1 if window is None else window - 1, 0)


def seen_part(q: Tensor, k: Tensor, band: Band) -> Ragged:
    """Return one sequence of queries and keys, whose queries see the keys of the band.

    The kernel aligns the last query with the last key. Each query of a part sees a key, so the
    number of keys before its place is not negative.
    """
    queries, keys = q.shape[0], k.shape[0]
    cu_queries, cu_keys = (
        torch.arange(2, dtype=torch.int32, device=q.device) * count for count in (queries, keys)
    )
    before = -1
    if band.window is not None and band.cuts(queries):
        before = band.window - 1 - band.offset + keys - queries
    return Ragged(cu_queries, cu_keys, queries, keys, before, -1)


library = torch.library.Library("slurmrl", "DEF")  # type: ignore[no-untyped-call]
library.define(  # type: ignore[no-untyped-call]
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int[] bounds, int part, "
    "str group, float scale, int? window) -> (Tensor, Tensor)"
)
library.impl(  # type: ignore[no-untyped-call]
    "ring_attention", _forward, "CompositeExplicitAutograd"
)
torch.library.register_autograd(
    "slurmrl::ring_attention", _backward, setup_context=setup, lib=library
)


class KeyBlock(NamedTuple):
    """Queries of this rank, and earlier keys to which they attend."""

    queries: slice
    keys: slice
    offset: int
    """Distance of the first query from the first key."""


class Hop(NamedTuple):
    """A step of the ring: this rank sends keys to one rank and receives keys of another rank."""

    taker: int
    """Rank to which keys are sent."""
    sent: tuple[slice, ...]
    """Rows of this rank's keys that are sent."""
    giver: int
    """Rank from which keys are received."""
    received: int
    """Number of received rows."""
    parts: tuple[KeyBlock, ...]
    """Attention calls with the received keys."""


@dataclass(frozen=True)
class RingSchedule:
    """The calls and transfers of one rank."""

    own: Packing
    """Parts of sequences within this rank's chunks."""
    parts: tuple[KeyBlock, ...]
    """Calls of the queries of this rank's second chunk with the keys of its first chunk."""
    hops: tuple[Hop, ...]


def chunks(tokens: int, part: int, ranks: int) -> list[range]:
    """Return the places in the packed tokens of each of 2 * ``ranks`` chunks.

    Each rank has up to ``part`` of the ``tokens``; the last ranks have fewer.
    """
    held = [min(max(tokens - rank * part, 0), part) for rank in range(ranks)]
    sizes = [-(-count // 2) for count in held] + [count // 2 for count in reversed(held)]
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def zigzag(tokens: int, part: int, ranks: int) -> Tensor:
    """Return the order [T] that sorts packed tokens by rank."""
    every = chunks(tokens, part, ranks)
    pairs = zip(every[:ranks], reversed(every[ranks:]), strict=True)
    return torch.cat([torch.arange(x.start, x.stop) for pair in pairs for x in pair])


@lru_cache(maxsize=8)
def schedule(
    bounds: tuple[int, ...], part: int, ranks: int, rank: int, window: int | None
) -> RingSchedule:
    """Return the calls and transfers of a rank, for sequences at ``bounds``."""
    every = chunks(bounds[-1], part, ranks)

    def needed(by: int, of: int) -> list[range]:
        """Return the last keys of each chunk of rank ``of`` that rank ``by`` needs."""
        return [_keys(bounds, every, by, chunk, window) for chunk in _chunks_of(of, ranks)]

    hops = []
    for distance in range(1, ranks):
        pairs = [(by, (by - distance) % ranks) for by in range(ranks)]
        if not any(len(keys) for by, of in pairs for keys in needed(by, of)):
            continue
        giver, taker = (rank - distance) % ranks, (rank + distance) % ranks
        wanted = needed(rank, giver)
        parts = _parts(bounds, every, rank, giver, wanted, window)
        rows = zip(_rows_of(every, rank), needed(taker, rank), strict=True)
        sent = tuple(slice(stop - len(keys), stop) for (_, stop), keys in rows)
        hops.append(Hop(taker, sent, giver, sum(map(len, wanted)), parts))
    first, second = (every[chunk] for chunk in _chunks_of(rank, ranks))
    own = [range(first.start, first.stop), range(second.start, second.start)]
    return RingSchedule(
        _own_packing(bounds, (first, second)),
        _parts(bounds, every, rank, rank, own, window),
        tuple(hops),
    )


def _chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _rows_of(every: Sequence[range], rank: int) -> list[tuple[int, int]]:
    """Return the rows (first, end) of a rank's two chunks in its tensors."""
    first, second = (len(every[chunk]) for chunk in _chunks_of(rank, len(every) // 2))
    return [(0, first), (first, first + second)]


def _seen(
    bounds: Sequence[int], queries: range, keys: range, window: int | None
) -> tuple[range, range]:
    """Return the places of queries that see an earlier chunk, and of the keys that they see."""
    nothing = range(0)
    if not queries or not keys:
        return nothing, nothing
    sequence = bisect_right(bounds, queries.start)
    start, stop = max(keys.start, bounds[sequence - 1]), min(queries.stop, bounds[sequence])
    if window is not None:
        start = max(start, queries.start - window + 1)
        stop = min(stop, keys.stop + window - 1)
    if start >= keys.stop:
        return nothing, nothing
    return range(queries.start, stop), range(start, keys.stop)


def _keys(
    bounds: Sequence[int], every: Sequence[range], by: int, chunk: int, window: int | None
) -> range:
    """Return the last keys of a chunk that a rank needs."""
    seen = [
        _seen(bounds, every[own], every[chunk], window)[1]
        for own in _chunks_of(by, len(every) // 2)
        if own > chunk
    ]
    return max(seen, key=len, default=range(0))


def _parts(
    bounds: Sequence[int],
    every: Sequence[range],
    rank: int,
    giver: int,
    held: Sequence[range],
    window: int | None,
) -> tuple[KeyBlock, ...]:
    """Return the calls of ``rank`` for the keys ``held`` that rank ``giver`` sent."""
    ranks, found = len(every) // 2, []
    for own, (row, _) in zip(_chunks_of(rank, ranks), _rows_of(every, rank), strict=True):
        before = 0
        for chunk, keys in zip(_chunks_of(giver, ranks), held, strict=True):
            queries, seen = _seen(bounds, every[own], every[chunk], window)
            if own > chunk and queries:
                start = before + seen.start - keys.start
                rows = slice(row, row + len(queries))
                places = slice(start, start + len(seen))
                found.append(KeyBlock(rows, places, queries.start - seen.start))
            before += len(keys)
    return tuple(found)


def _own_packing(bounds: Sequence[int], own: Sequence[range]) -> Packing:
    """Return the boundaries of sequences and chunks within a rank's chunks."""
    lengths = []
    for chunk in own:
        inner = bounds[bisect_right(bounds, chunk.start) : bisect_left(bounds, chunk.stop)]
        places = [chunk.start, *inner, chunk.stop]
        lengths += [stop - start for start, stop in pairwise(places) if stop > start]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    return Packing(ends, max(lengths, default=0))
