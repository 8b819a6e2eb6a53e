"""The current batch on this rank. Results remain on their ranks until a call needs them elsewhere.

For each call, `Shares` divides the items into parts, one per data-parallel rank. `Mail` sends
samples between ranks. `share` sends samples from the first rank of a part to its other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.meta import SampleMeta
from slurmrl.data.order import (
    Delivery,
    Spread,
    balanced_partition,
    deliveries,
    even_partition,
    joined,
)
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Method
from slurmrl.plan.model import CallPlan
from slurmrl.tensors.ops.collectives import broadcast_bytes, broadcast_sized
from slurmrl.tensors.parallel.groups import Activity, ParallelContext
from slurmrl.tensors.parallel.topology import ModelRanks, topology_of

COMPLETIONS = "input_ids"
"""Key whose lengths are the lengths of prompt and completion."""


class Batch:
    """One batch, from its first call to its last.

    Every rank executes `inputs` and `add` for every call in the plan's order, even if it takes no
    part in the call. The plan and the lengths of the items determine which rank has which items of
    a key. Therefore ranks exchange only items and the lengths of completions.

    A rank sends items to later calls as soon as it knows their readers, without waiting. Later,
    when the readers need the items, the rank might be busy with another call.
    """

    def __init__(
        self,
        meta: SampleMeta,
        take: Callable[[Sequence[int]], SequenceSample],
        calls: Sequence[CallPlan],
        shares: Shares,
        rank: int,
        mail: Mail,
        activity: Activity,
        *,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        """Begin a batch that executes ``calls[first:stop]``.

        ``take`` reads the items at given positions of the batch from the dataset. `take_over` gets
        the results of earlier calls.
        """
        self.ids = meta.ids
        self._calls, self._first = calls, first
        self._take = take
        self._shares = shares
        self._order = {call.name: index for index, call in enumerate(calls)}
        self._readers = [
            (maker, [call for call in calls[first:stop] if _reads(call, maker)])
            for maker in calls[:stop]
        ]
        """For each call, the later calls that read its result and have not received it yet."""
        self._sent: dict[Spread, set[str]] = {}
        """Mapping from spread to the keys that were sent to its ranks; equal on every rank."""
        self._makers = {key: call for call in calls for key in call.outputs}
        self._last_readers = {key: index for index, call in enumerate(calls) for key in call.inputs}
        self._rank = rank
        self._mail = mail
        self._activity = activity
        self._made: dict[str, SequenceSample] = {}
        """Mapping from call to this rank's results; only the first rank of a part has results."""
        self._held: dict[Spread, SequenceSample] = {}
        """This rank's part under each spread, with the keys that have arrived."""
        self._arrived: dict[Spread, set[str]] = {}
        """Mapping from spread to the keys that all its ranks have; equal on every rank."""
        self._lengths: Callable[[], Tensor] | None = None
        """Function that waits for the lengths of all items, including their completions."""

    def take_over(self, sources: Sequence[Batch]) -> None:
        """Take the results of this batch's items from the batches of candidates.

        Each item is in one of ``sources`` and remains on the ranks that have it.
        """
        origins = {
            name: (source, place)
            for source, batch in enumerate(sources)
            for place, name in enumerate(batch.ids)
        }
        items = [origins[name] for name in self.ids]
        for call in self._calls[: self._first]:
            spread = joined([batch._shares.of(call) for batch in sources], items)
            self._shares.use_spread(call, spread)
            made = [batch._made[call.name] for batch in sources if call.name in batch._made]
            part = spread.part_of(self._rank)
            if made and part is not None:
                own = [self.ids[item] for item in spread.parts[part]]
                self._made[call.name] = _by_ids(SequenceSample.gather(made), own)
        if self._shares.generation is not None:
            lengths = [batch._all_lengths() for batch in sources]
            self._shares.use_lengths([lengths[source][place] for source, place in items])

    def inputs(self, call: CallPlan, context: ParallelContext | None) -> SequenceSample | None:
        """Return this rank's part of a call's inputs; None if it takes no part in the call."""
        spread = self._spread(call)
        self._send_made(self._order[call.name])
        arrived = self._arrived.setdefault(spread, set())
        wanted: dict[str, list[str]] = {}
        for key in call.inputs:
            if key in self._makers and key not in arrived:
                wanted.setdefault(self._makers[key].name, []).append(key)
        for keys in wanted.values():
            delivered = self._delivered(self._makers[keys[0]], keys, call)
            if context is not None:
                shared = share(delivered, context)
                if shared is not None:
                    self._part(spread).update_(shared)
            arrived.update(keys)
        return None if context is None else self._part(spread).only(call.inputs)

    def add(self, call: CallPlan, made: SequenceSample | None) -> None:
        """Add a call's output on the first rank of a part; drop keys that no later call reads."""
        spread = self._spread(call)
        if made is not None and spread.speaks(self._rank):
            own = self._part(spread)
            if made.ids != own.ids:
                raise ValueError(
                    f"{call.name} returned samples {made.ids[:3]}, expected {own.ids[:3]}"
                )
            self._made[call.name] = made
        if call.name == self._shares.generation:
            self._lengths = self._mail.total(self._own_lengths(call))
        now = self._order[call.name]
        read_later = {key for key, last in self._last_readers.items() if last > now}
        self._made = {name: _having(sample, read_later) for name, sample in self._made.items()}
        self._held = {spread: _having(sample, read_later) for spread, sample in self._held.items()}

    def _own_lengths(self, call: CallPlan) -> Tensor:
        """Return the lengths of items whose completions this rank has made: int64 [items].

        The lengths of other items are 0.
        """
        lengths = torch.zeros(len(self.ids), dtype=torch.int64)
        if call.name in self._made:
            spread = self._shares.of(call)
            part = spread.part_of(self._rank)
            assert part is not None, "only the first rank of a part keeps outputs"
            places = list(spread.parts[part])
            made = self._made[call.name]
            own = made.item_lengths(COMPLETIONS if COMPLETIONS in made.keys else None)
            lengths[places] = torch.tensor(own, dtype=torch.int64)
        return lengths

    def _spread(self, call: CallPlan) -> Spread:
        """Return the spread of a call. First wait for lengths on which the spread may depend."""
        if self._shares.needs_lengths(call):
            self._shares.use_lengths(self._all_lengths())
        return self._shares.of(call)

    def _all_lengths(self) -> list[int]:
        """Return the lengths of all items, after every rank has made its completions."""
        assert self._lengths is not None, "generation comes first"
        self._activity.phase("waiting for the lengths of all completions")
        lengths: list[int] = self._lengths().tolist()
        return lengths

    def _part(self, spread: Spread) -> SequenceSample:
        """Return this rank's part under a spread. The spread must include this rank."""
        if spread not in self._held:
            part = spread.part_of(self._rank)
            assert part is not None, "only ranks of the layout call this"
            self._held[spread] = self._take(spread.parts[part])
        return self._held[spread]

    def _send_made(self, done: int) -> None:
        """Send the outputs of the first ``done`` calls to their readers, in the plan's order.

        Stop at the first reader whose shares are not known yet.
        """
        for maker, readers in self._readers[:done]:
            while readers and not self._shares.needs_lengths(readers[0]):
                self._send(maker, readers.pop(0))

    def _send(self, maker: CallPlan, reader: CallPlan) -> None:
        """Send this rank's outputs to the ranks of a reader that lack them."""
        source, target = self._shares.of(maker), self._shares.of(reader)
        sent = self._sent.setdefault(target, set())
        keys = [key for key in reader.inputs if key in maker.outputs and key not in sent]
        sent.update(keys)
        if source == target or not keys:
            return
        for delivery in deliveries(source, target):
            if self._rank == delivery.sender != delivery.receiver:
                sample = self._own(maker, keys, delivery)
                self._mail.send(sample, delivery.receiver, self._tag(maker, reader))

    def _delivered(
        self, maker: CallPlan, keys: Sequence[str], reader: CallPlan
    ) -> SequenceSample | None:
        """Return outputs of ``maker`` for all items of this rank's part of ``reader``.

        Return None on a rank that is not the first of a part.
        """
        source, target = self._shares.of(maker), self._shares.of(reader)
        if source == target:
            speaks = source.speaks(self._rank)
            return self._made[maker.name].only(keys) if speaks else None
        received: list[SequenceSample] = []
        for delivery in deliveries(source, target):
            if self._rank != delivery.receiver:
                continue
            if self._rank == delivery.sender:
                received.append(self._own(maker, keys, delivery))
                continue
            self._activity.await_from(delivery.sender, f"items of {maker.name}")
            received.append(self._mail.receive(delivery.sender, self._tag(maker, reader)))
            self._activity.phase("")
        if not received:
            return None
        return _by_ids(SequenceSample.gather(received), self._part(target).ids)

    def _own(self, maker: CallPlan, keys: Sequence[str], delivery: Delivery) -> SequenceSample:
        """Return the items of a delivery that this rank has made."""
        source = self._shares.of(maker)
        part = source.part_of(self._rank)
        assert part is not None, "a sender has a part"
        own = {item: place for place, item in enumerate(source.parts[part])}
        return self._made[maker.name].only(keys).take([own[item] for item in delivery.items])

    def _tag(self, maker: CallPlan, reader: CallPlan) -> int:
        return self._order[maker.name] * len(self._order) + self._order[reader.name]


def _reads(call: CallPlan, maker: CallPlan) -> bool:
    return not set(call.inputs).isdisjoint(maker.outputs)


def _by_ids(sample: SequenceSample, ids: Sequence[str]) -> SequenceSample:
    """Return the items with these ids from a sample, in this order."""
    places = {name: place for place, name in enumerate(sample.ids)}
    return sample.take([places[name] for name in ids])


def _having(sample: SequenceSample, keys: Collection[str]) -> SequenceSample:
    return sample.only(key for key in sample.keys if key in keys)


class Shares:
    """Divides the items of a batch among data-parallel ranks, balanced by numbers of tokens.

    The division is separate for each minibatch. If a batch begins with generation, the lengths of
    completions are still unknown. Therefore, each rank first gets the same number of items. Prompt
    tokens are balanced as far as possible. When all ranks know the lengths (`use_lengths`), later
    calls with a model get new shares. Calls without a model keep the shares of the generation.
    """

    def __init__(
        self,
        calls: Sequence[CallPlan],
        layout_of: Callable[[CallPlan], ModelRanks],
        lengths: Sequence[int],
        minibatches: int,
    ) -> None:
        """``lengths`` are the lengths of the items in the dataset."""
        first = calls[0]
        generates = first.method == Method.GENERATE
        self._layout_of = layout_of
        self._lengths = tuple(lengths)
        self._minibatches = minibatches if generates else 1
        self._even = generates
        self._waiting = frozenset(
            call.name for call in calls[1:] if generates and call.role is not None
        )
        """Names of the calls whose shares depend on the lengths of completions."""
        self.generation = first.name if self._waiting else None
        """Name of the call that makes these completions; None without such calls."""
        self._known: tuple[int, ...] | None = None
        self._spreads: dict[str, Spread] = {}

    def needs_lengths(self, call: CallPlan) -> bool:
        """Return whether `use_lengths` must be called before `of`."""
        return call.name in self._waiting and self._known is None

    def use_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths of all items, completions included. All ranks must set equal lengths."""
        self._known = tuple(lengths)

    def use_spread(self, call: CallPlan, spread: Spread) -> None:
        """Set the shares of a call that the batches of candidates have executed."""
        self._spreads[call.name] = spread

    def of(self, call: CallPlan) -> Spread:
        if call.name not in self._spreads:
            self._spreads[call.name] = self._spread(call)
        return self._spreads[call.name]

    def _spread(self, call: CallPlan) -> Spread:
        model = self._layout_of(call)
        topology = topology_of(model)
        ranks = topology.size("dp")
        if call.name in self._waiting:
            assert self._known is not None, "the lengths are known first"
            parts = balanced_partition(self._known, ranks, self._minibatches)
        elif self._even:
            parts = even_partition(self._lengths, ranks, self._minibatches)
        else:
            parts = balanced_partition(self._lengths, ranks)
        members = (topology.filter(dp=part) for part in range(ranks))
        return Spread(
            tuple(map(tuple, parts)),
            tuple(tuple(model.ranks[index] for index in indices) for indices in members),
        )


ALL = "data"
"""Name of the group of ranks with the same part. Missing if each part has one rank."""


class Mail:
    """Sends samples between ranks, through host memory.

    A rank sends without waiting. Messages with the same ``tag`` between two ranks keep their order.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Send with ``group`` (gloo, all ranks), and put received tensors on ``device``."""
        self._group = group
        self._device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """Transfers in progress, with the tensors that must exist until they end."""

    def send(self, sample: SequenceSample, to: int, tag: int) -> None:
        header = _header(sample)
        parts = [_bytes(sample.tensor(key)).cpu() for key in header["tensors"]]
        encoded = json.dumps(header).encode()
        content = torch.cat([torch.frombuffer(bytearray(encoded), dtype=torch.uint8), *parts])
        sizes = torch.tensor([len(encoded), content.numel()])
        for tensor in (sizes, content):
            work = dist.isend(tensor, to, group=self._group, tag=tag)
            assert work is not None, "this rank is in the group"
            self._sent.append((work, tensor))

    def receive(self, sender: int, tag: int) -> SequenceSample:
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, sender, group=self._group, tag=tag)
        header_size, size = sizes.tolist()
        content = torch.empty(size, dtype=torch.uint8)
        dist.recv(content, sender, group=self._group, tag=tag)
        header = json.loads(bytes(content[:header_size].numpy()))
        return _unpacked(header, content[header_size:], self._device)

    def total(self, own: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor in host memory over all ranks; return a function that waits for it.

        Collective.
        """
        work = dist.all_reduce(own, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._sent.append((work, own))

        def wait() -> Tensor:
            work.wait()
            return own

        return wait

    def finish(self) -> None:
        """Wait until all sent samples have arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def share(sample: SequenceSample | None, context: ParallelContext) -> SequenceSample | None:
    """Return the ``sample`` of a group's first rank on every rank of the group. Collective."""
    if ALL not in context.groups:
        return sample
    group, device = context.group(ALL), context.device
    header = json.loads(broadcast_bytes(json.dumps(_header(sample)).encode(), group, device))
    if header is None:
        return None
    buffer = torch.empty(0, dtype=torch.uint8, device=device)
    if sample is not None and context.is_leader:
        held = [_bytes(sample.tensor(key)) for key in header["tensors"]]
        buffer = torch.cat([part.to(device) for part in (buffer, *held)])
    size = sum(_size(spec) for spec in header["tensors"].values())
    return _unpacked(header, broadcast_sized(buffer, size, group), device)


def _header(sample: SequenceSample | None) -> Any:
    if sample is None:
        return None
    return {
        "ids": sample.ids,
        "lengths": dict(sample.lengths),
        "metadata": dict(sample.metadata),
        "tensors": {
            key: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "host": tensor.device.type == "cpu",
            }
            for key, tensor in sample.data.items()
            if tensor is not None
        },
    }


def _unpacked(header: dict[str, Any], buffer: Tensor, device: torch.device) -> SequenceSample:
    """Return the sample that ``header`` describes; ``buffer`` contains the bytes of its tensors."""
    sizes = [_size(spec) for spec in header["tensors"].values()]
    data: dict[str, Tensor | None] = dict.fromkeys(header["lengths"])
    for (key, spec), (first, last) in zip(
        header["tensors"].items(), pairwise(accumulate(sizes, initial=0)), strict=True
    ):
        values = buffer[first:last].clone().view(getattr(torch, spec["dtype"]))
        data[key] = values.view(spec["shape"]).to("cpu" if spec["host"] else device)
    return SequenceSample(tuple(header["ids"]), header["lengths"], header["metadata"], data)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _size(spec: dict[str, Any]) -> int:
    item = torch.empty(0, dtype=getattr(torch, spec["dtype"])).element_size()
    return item * int(torch.Size(spec["shape"]).numel())
