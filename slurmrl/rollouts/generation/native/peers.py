"""The ranks that hold one model together, and what its leader sends to the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from slurmrl.errors import RunFailedError
from slurmrl.tensors.ops.collectives import Group, broadcast_sized, gathered

Call = Sequence[Any]
"""The name of a call and its arguments, as JSON has them."""
INLINE_BYTES: Final = 2048
"""Size of the broadcast that begins a message. Longer ones take a second broadcast."""
SIZE_BYTES: Final = 8
"""The length of a message, in front of it."""
IDLE: Final = timedelta(days=30)
"""Time-out of a rank that waits for a message: a leader without requests sends none."""


def other_tokens(rank: int, own: tuple[int, int], leader: tuple[int, int]) -> RunFailedError:
    """Return the error of a rank that has sampled other tokens than its leader.

    ``own`` and ``leader`` are (number of tokens, checksum).
    """
    return RunFailedError(
        f"rank {rank} of a model that is split has drawn other tokens than its leader "
        f"({own[0]} and {leader[0]} tokens, checksums {own[1]:08x} and {leader[1]:08x}): "
        "the ranks' processors must be alike"
    )


@dataclass(eq=False)
class Peers:
    """The ranks of one copy of a model. The first one is the leader."""

    group: Group
    device: torch.device
    broadcasts: int = field(default=0, init=False)
    """Number of broadcasts so far."""

    @property
    def leads(self) -> bool:
        return self.group.rank() == 0

    def send(self, calls: Sequence[Call]) -> None:
        """Send calls to the others. On the leader only."""
        content = json.dumps(calls).encode()
        inline = SIZE_BYTES + len(content) <= INLINE_BYTES
        message = len(content).to_bytes(SIZE_BYTES, "little") + (content if inline else b"")
        self._begin(torch.frombuffer(bytearray(message.ljust(INLINE_BYTES)), dtype=torch.uint8))
        if not inline:
            rest = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self._rest(rest, len(content))

    def receive(self) -> list[Call]:
        """Wait for the leader's next calls, however long it has none. On the others only.

        Raises RuntimeError if the leader is gone.
        """
        message = self._begin(torch.zeros(INLINE_BYTES, dtype=torch.uint8))
        size = int.from_bytes(message[:SIZE_BYTES], "little")
        content = message[SIZE_BYTES : SIZE_BYTES + size]
        if SIZE_BYTES + size > INLINE_BYTES:
            content = self._rest(torch.empty(0, dtype=torch.uint8), size)
        calls: list[Call] = json.loads(content)
        return calls

    def answers(self, own: int) -> list[int]:
        """The numbers that all ranks give, in rank order. Collective."""
        values: list[int] = gathered(torch.tensor([own], device=self.device), self.group).tolist()
        return values

    def compare(self, drawn: int, checksum: int) -> None:
        """Compare what the ranks have drawn: the number of tokens, and a checksum. Collective.

        Raises RunFailedError on all of them if they differ.
        """
        own = torch.tensor([[drawn, checksum]], device=self.device)
        leader, *others = map(tuple, gathered(own, self.group).tolist())
        for rank, other in enumerate(others, start=1):
            if other != leader:
                raise other_tokens(rank, other, leader)

    def _begin(self, message: torch.Tensor) -> bytes:
        message = message.to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, IDLE
        self.group.broadcast([message], options).wait()
        self.broadcasts += 1
        return bytes(message.cpu().numpy())

    def _rest(self, own: torch.Tensor, size: int) -> bytes:
        self.broadcasts += 1
        received = broadcast_sized(own.to(self.device), size, self.group)
        return bytes(received.cpu().numpy())
