"""The current batch on this rank: keys stay with the ranks that made them until a call needs them
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from slurmrl.data.meta import SampleMeta
from slurmrl.data.packing import Delivery, Spread, deliveries, joined
from slurmrl.data.sample import SequenceSample
from slurmrl.parallel.activity import Activity
from slurmrl.parallel.groups import ParallelContext
from slurmrl.plan.model import CallPlan
from slurmrl.workers.worker.shares import Shares
from slurmrl.workers.worker.sharing import Mail, share

COMPLETIONS = "input_ids"
"""Key whose lengths are those of items with their completions."""


class Batch:
    """One batch, from its first call to its last.

    Every rank executes `inputs` and `add` for every call in the plan's order, whether it takes part
    in the call or not. Which rank has which items of a key follows from the plan and the items'
    lengths, so ranks exchange nothing but these, when completions have been made, and the items.
    Items leave for all later calls as soon as it is known which ranks read them: when those need
    them, this rank may be busy with a call that they take no part in. A sender does not wait.
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
        """``take`` reads the items at these places of the batch from the dataset. This batch
        executes ``calls[first:stop]``; ``take_over`` gets what the calls before ``first`` made."""
        self.ids = meta.ids
        self._calls, self._first = calls, first
        self._take = take
        self._shares = shares
        self._order = {call.name: index for index, call in enumerate(calls)}
        self._readers = [
            (maker, [call for call in calls[first:stop] if _reads(call, maker)])
            for maker in calls[:stop]
        ]
        """The calls that read what a call makes and to which it has not been sent yet."""
        self._sent: dict[Spread, set[str]] = {}
        """The keys that have been sent to the ranks of a spread; the same on every rank."""
        self._makers = {key: call for call in calls for key in call.outputs}
        self._last_readers = {key: index for index, call in enumerate(calls) for key in call.inputs}
        self._rank = rank
        self._mail = mail
        self._activity = activity
        self._made: dict[str, SequenceSample] = {}
        """What this rank's part of each call made, by call; on the part's first rank only."""
        self._held: dict[Spread, SequenceSample] = {}
        """This rank's part under each spread, with the keys that have arrived."""
        self._arrived: dict[Spread, set[str]] = {}
        """The keys that all ranks of a spread hold; the same on every rank."""
        self._lengths: Callable[[], Tensor] | None = None
        """Waits for the lengths of all items with their completions."""

    def take_over(self, sources: Sequence[Batch]) -> None:
        """Get what earlier batches, of candidates, have made of this batch's items. Each item is in
        one of them, and stays with the ranks that have it."""
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
        """This rank's items of what the call reads; None if the rank takes no part in it."""
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
        """Keep what a call made on the first rank of a part, and drop the keys that no later call
        reads."""
        spread = self._spread(call)
        if made is not None and spread.speaks(self._rank):
            own = self._part(spread)
            if made.ids != own.ids:
                raise ValueError(
                    f"{call.name} made samples {made.ids[:3]}, its part is {own.ids[:3]}"
                )
            self._made[call.name] = made
        if call.name == self._shares.generation:
            self._lengths = self._mail.total(self._own_lengths(call))
        now = self._order[call.name]
        read_later = {key for key, last in self._last_readers.items() if last > now}
        self._made = {name: _having(sample, read_later) for name, sample in self._made.items()}
        self._held = {spread: _having(sample, read_later) for spread, sample in self._held.items()}

    def _own_lengths(self, call: CallPlan) -> Tensor:
        """The lengths of the items that this rank has made, at their places: int64 [items]."""
        lengths = torch.zeros(len(self.ids), dtype=torch.int64)
        if call.name in self._made:
            spread = self._shares.of(call)
            part = spread.part_of(self._rank)
            assert part is not None, "only a speaker keeps what was made"
            places = list(spread.parts[part])
            made = self._made[call.name]
            own = made.item_lengths(COMPLETIONS if COMPLETIONS in made.keys else None)
            lengths[places] = torch.tensor(own, dtype=torch.int64)
        return lengths

    def _spread(self, call: CallPlan) -> Spread:
        """The spread of a call, after it is known how long the completions are if it follows from
        that."""
        if self._shares.needs_lengths(call):
            self._shares.use_lengths(self._all_lengths())
        return self._shares.of(call)

    def _all_lengths(self) -> list[int]:
        """The lengths of all items, once every rank has made its completions."""
        assert self._lengths is not None, "generation comes first"
        self._activity.phase("waiting for the lengths of all completions")
        lengths: list[int] = self._lengths().tolist()
        return lengths

    def _part(self, spread: Spread) -> SequenceSample:
        """This rank's part under a spread of the layout that it is in."""
        if spread not in self._held:
            part = spread.part_of(self._rank)
            assert part is not None, "only ranks of the layout ask"
            self._held[spread] = self._take(spread.parts[part])
        return self._held[spread]

    def _send_made(self, done: int) -> None:
        """Send the outputs of the first ``done`` calls to their readers, in the plan's order, up to
        the first one whose shares are not known yet."""
        for maker, readers in self._readers[:done]:
            while readers and not self._shares.needs_lengths(readers[0]):
                self._send(maker, readers.pop(0))

    def _send(self, maker: CallPlan, reader: CallPlan) -> None:
        """Send what this rank has made to the ranks of a reader, unless they got it for an earlier
        one."""
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
        """The keys that a call made, of all items of this rank's part for the reader; None on a
        rank that does not speak for a part."""
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
        """The items of a delivery that this rank has made."""
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
    """These items of a sample, in this order."""
    places = {name: place for place, name in enumerate(sample.ids)}
    return sample.take([places[name] for name in ids])


def _having(sample: SequenceSample, keys: Collection[str]) -> SequenceSample:
    return sample.only(key for key in sample.keys if key in keys)
