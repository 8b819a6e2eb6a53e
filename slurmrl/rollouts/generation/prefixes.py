"""Which instances have which prefixes in their caches, as far as the requests tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens by which prefixes are compared."""
MOST_BLOCKS = 2**17
"""Blocks that are remembered; those that were not seen for longest are forgotten first."""


class PrefixIndex:
    """Remembers which instance has worked on which prefix. Instances are numbers.

    A block is known by a hash of all tokens up to its end. Two prefixes with the same hash send a
    request to an instance that does not have its prefix, which costs time only.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._owners: OrderedDict[int, frozenset[int]] = OrderedDict()
        self._most = most_blocks

    def remember(self, tokens: Sequence[int], instance: int) -> None:
        """``instance`` works on ``tokens``."""
        for block in _blocks(tokens):
            self._owners[block] = self._owners.get(block, frozenset()) | {instance}
            self._owners.move_to_end(block)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def matches(self, tokens: Sequence[int]) -> dict[int, int]:
        """By instance, how many tokens of the beginning of ``tokens`` it has worked on."""
        found: dict[int, int] = {}
        for number, block in enumerate(_blocks(tokens), start=1):
            owners = self._owners.get(block)
            if owners is None:
                break
            for owner in owners:
                if found.get(owner, 0) == (number - 1) * BLOCK:
                    found[owner] = number * BLOCK
        return found

    def forget(self, instance: int) -> None:
        """``instance`` has lost its cache."""
        for block, owners in list(self._owners.items()):
            if instance in owners:
                if len(owners) == 1:
                    del self._owners[block]
                else:
                    self._owners[block] = owners - {instance}


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """A hash of each prefix that is a whole number of blocks."""
    state = 0
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        state = hash((state, *tokens[begin : begin + BLOCK]))
        yield state
