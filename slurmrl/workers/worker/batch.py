"""The current batch on this rank: keys stay with the ranks that made them until a call needs them
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from slurmrl.data.meta import SampleMeta
from slurmrl.data.sample import SequenceSample
from slurmrl.data.spread import Spread, deliveries
from slurmrl.parallel.activity import Activity
from slurmrl.parallel.groups import ParallelContext
from slurmrl.plan.model import CallPlan
from slurmrl.workers.worker.sharing import Mail, share


class Batch:
    """One batch, from its first call to its last.

    Every rank executes `inputs` and `add` for every call in the plan's order, whether it takes part
    in the call or not. Which rank has which items of a key follows from the plan and the prompts
    alone, so ranks exchange nothing but the items. A rank that only sends does not wait.
    """

    def __init__(
        self,
        meta: SampleMeta,
        take: Callable[[Sequence[int]], SequenceSample],
        calls: Sequence[CallPlan],
        spreads: Mapping[str, Spread],
        rank: int,
        mail: Mail,
        activity: Activity,
    ) -> None:
        """``take`` reads the items at these places of the batch from the dataset; ``spreads`` are
        those of the calls, by their names."""
        self.ids = meta.ids
        self._take = take
        self._spreads = spreads
        self._order = {call.name: index for index, call in enumerate(calls)}
        self._makers = {key: call.name for call in calls for key in call.outputs}
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

    def inputs(self, call: CallPlan, context: ParallelContext | None) -> SequenceSample | None:
        """This rank's items of what the call reads; None if the rank takes no part in it."""
        spread = self._spreads[call.name]
        arrived = self._arrived.setdefault(spread, set())
        wanted: dict[str, list[str]] = {}
        for key in call.inputs:
            if key in self._makers and key not in arrived:
                wanted.setdefault(self._makers[key], []).append(key)
        for maker, keys in wanted.items():
            delivered = self._delivered(maker, keys, spread)
            if context is not None:
                shared = share(delivered, context)
                if shared is not None:
                    self._part(spread).update_(shared)
            arrived.update(keys)
        return None if context is None else self._part(spread).only(call.inputs)

    def add(self, call: CallPlan, made: SequenceSample | None) -> None:
        """Keep what a call made on the first rank of a part, and drop the keys that no later call
        reads."""
        if made is not None and self._spreads[call.name].speaks(self._rank):
            own = self._part(self._spreads[call.name])
            if made.ids != own.ids:
                raise ValueError(
                    f"{call.name} made samples {made.ids[:3]}, its part is {own.ids[:3]}"
                )
            self._made[call.name] = made
        now = self._order[call.name]
        read_later = {key for key, last in self._last_readers.items() if last > now}
        self._made = {name: _having(sample, read_later) for name, sample in self._made.items()}
        self._held = {spread: _having(sample, read_later) for spread, sample in self._held.items()}

    def _part(self, spread: Spread) -> SequenceSample:
        """This rank's part under a spread of the layout that it is in."""
        if spread not in self._held:
            part = spread.part_of(self._rank)
            assert part is not None, "only ranks of the layout ask"
            self._held[spread] = self._take(spread.parts[part])
        return self._held[spread]

    def _delivered(self, maker: str, keys: Sequence[str], target: Spread) -> SequenceSample | None:
        """The keys that a call made, of all items of this rank's part; None on a rank that does not
        speak for a part. Sends what other ranks need of this one."""
        source = self._spreads[maker]
        if source == target:
            return self._made[maker].only(keys) if source.speaks(self._rank) else None
        received: list[SequenceSample] = []
        for delivery in deliveries(source, target):
            if self._rank not in (delivery.sender, delivery.receiver):
                continue
            if self._rank != delivery.sender:
                self._activity.phase(f"waiting for {maker} of rank {delivery.sender}")
                received.append(self._mail.receive(delivery.sender))
                continue
            part = source.part_of(self._rank)
            assert part is not None, "a sender has a part"
            own = {item: place for place, item in enumerate(source.parts[part])}
            sample = self._made[maker].only(keys).take([own[item] for item in delivery.items])
            if self._rank == delivery.receiver:
                received.append(sample)
            else:
                self._mail.send(sample, delivery.receiver)
        if not received:
            return None
        gathered = SequenceSample.gather(received)
        places = {name: place for place, name in enumerate(gathered.ids)}
        return gathered.take([places[name] for name in self._part(target).ids])


def _having(sample: SequenceSample, keys: Collection[str]) -> SequenceSample:
    return sample.only(key for key in sample.keys if key in keys)
