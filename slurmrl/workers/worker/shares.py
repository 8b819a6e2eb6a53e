"""The items of a batch that each data-parallel rank works on, call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurmrl.data.packing import Spread, balanced_partition, even_partition
from slurmrl.graph.call import Method
from slurmrl.parallel.topology import ModelRanks, topology_of
from slurmrl.plan.model import CallPlan


class Shares:
    """Balances items by their numbers of tokens, separately for each minibatch.

    Completions cost more than prompts, and their lengths are not known before they are made. So a
    generation that begins a batch gets equal numbers of items, with prompt tokens as balanced as
    that allows; once all ranks know the lengths (`use_lengths`), the models' later calls get new
    shares. A call without a model stays where the completions were made: its cost does not follow
    the lengths.
    """

    def __init__(
        self,
        calls: Sequence[CallPlan],
        layout_of: Callable[[CallPlan], ModelRanks],
        lengths: Sequence[int],
        minibatches: int,
    ) -> None:
        """``lengths`` are those of the items as the dataset gives them."""
        first = calls[0]
        generates = first.method == Method.GENERATE
        self._layout_of = layout_of
        self._lengths = tuple(lengths)
        self._minibatches = minibatches if generates else 1
        self._even = generates
        self._waiting = frozenset(
            call.name for call in calls[1:] if generates and call.role is not None
        )
        """The calls whose shares follow from the lengths of completions."""
        self.generation = first.name if self._waiting else None
        """The call that makes the lengths that other calls' shares follow from."""
        self._known: tuple[int, ...] | None = None
        self._spreads: dict[str, Spread] = {}

    def needs_lengths(self, call: CallPlan) -> bool:
        """Whether `use_lengths` must come before `of`."""
        return call.name in self._waiting and self._known is None

    def use_lengths(self, lengths: Sequence[int]) -> None:
        """``lengths`` of all items, with their completions; the same on every rank."""
        self._known = tuple(lengths)

    def use_spread(self, call: CallPlan, spread: Spread) -> None:
        """Set the shares of a call that earlier batches have executed."""
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
            assert self._known is not None, "the lengths come first"
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
