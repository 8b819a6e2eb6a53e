"""Continuous batching on the ranks of a split model.

Each rank has a batch, which depends only on the calls of its methods and on the sampled tokens. All
ranks have the whole logits and sample the same tokens. The leader therefore sends its calls to the
other ranks, in one broadcast for each call of the model, and they repeat the calls. If all ranks
know the requests beforehand, each rank makes the calls itself, and the ranks compare their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from slurmrl.errors import RunFailedError
from slurmrl.rollouts.generation.base import GenerationRequest
from slurmrl.rollouts.generation.batch_rollout import RequestBatch
from slurmrl.rollouts.generation.native.sequence import Sequence
from slurmrl.tensors.ops.collectives import Group, broadcast_sized, gathered

Call = tuple[Any, ...]
"""The name of a method and its arguments, as JSON values."""
INLINE_BYTES: Final = 2048
"""Size of the first broadcast of a message. Longer messages take a second broadcast."""
SIZE_BYTES: Final = 8
"""Number of bytes for the length of a message, at its beginning."""
IDLE: Final = timedelta(days=30)
"""Time limit of a rank that waits for a message. A leader without requests sends no messages."""
COMPARED_CALLS = {"cpu": 1, "cuda": 8}
"""Mapping from device type to the calls between two comparisons. A comparison waits for the GPU."""


def other_tokens(rank: int, own: tuple[int, int], leader: tuple[int, int]) -> RunFailedError:
    """Return the error for a rank that has sampled other tokens than its leader.

    ``own`` and ``leader`` are (number of tokens, checksum).
    """
    return RunFailedError(
        f"rank {rank} of a split model has sampled other tokens than its leader "
        f"({own[0]} and {leader[0]} tokens, checksums {own[1]:08x} and {leader[1]:08x}): "
        "all ranks need the same kind of processor"
    )


@dataclass(eq=False)
class SplitRanks:
    """The ranks of one copy of a model. The first rank is the leader."""

    group: Group
    device: torch.device
    broadcasts: int = field(default=0, init=False)
    """Number of broadcasts so far."""

    @property
    def is_leader(self) -> bool:
        return self.group.rank() == 0

    def send(self, calls: list[Call]) -> None:
        """Send calls to the other ranks. Only the leader calls this method."""
        content = json.dumps(calls).encode()
        inline = SIZE_BYTES + len(content) <= INLINE_BYTES
        message = len(content).to_bytes(SIZE_BYTES, "little") + (content if inline else b"")
        self._begin(torch.frombuffer(bytearray(message.ljust(INLINE_BYTES)), dtype=torch.uint8))
        if not inline:
            rest = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self._rest(rest, len(content))

    def receive(self) -> list[Call]:
        """Wait for the leader's next calls, without a time limit. The leader does not call this.

        Raises RuntimeError if the leader has ended.
        """
        message = self._begin(torch.zeros(INLINE_BYTES, dtype=torch.uint8))
        size = int.from_bytes(message[:SIZE_BYTES], "little")
        content = message[SIZE_BYTES : SIZE_BYTES + size]
        if SIZE_BYTES + size > INLINE_BYTES:
            content = self._rest(torch.empty(0, dtype=torch.uint8), size)
        calls: list[Call] = json.loads(content)
        return calls

    def answers(self, own: int) -> list[int]:
        """Return the value ``own`` of each rank, in rank order. Collective."""
        values: list[int] = gathered(torch.tensor([own], device=self.device), self.group).tolist()
        return values

    def compare(self, sampled: int, checksum: int) -> None:
        """Compare the numbers of sampled tokens and the checksums of all ranks. Collective.

        Raises RunFailedError on all ranks if these differ.
        """
        own = torch.tensor([[sampled, checksum]], device=self.device)
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


class WrappedBatch:
    """Base class that forwards all calls to a rank's batch."""

    def __init__(self, batch: RequestBatch, peers: SplitRanks) -> None:
        self._batch, self._peers = batch, peers

    @property
    def sampled(self) -> int:
        return self._batch.sampled

    @property
    def checksum(self) -> int:
        return self._batch.checksum

    @property
    def busy(self) -> bool:
        return self._batch.busy

    def add(self, request: GenerationRequest) -> list[Sequence]:
        return self._batch.add(request)

    def step(self) -> list[Sequence]:
        return self._batch.step()

    def abort(self, sequences: list[Sequence]) -> None:
        self._batch.abort(sequences)

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        self._batch.renew(version, stale_cache=stale_cache)


class ComparedBatch(WrappedBatch):
    """Batch of a rank if all ranks add the same requests. The ranks compare their tokens."""

    def __init__(self, batch: RequestBatch, peers: SplitRanks) -> None:
        super().__init__(batch, peers)
        self._calls = 0
        self._every = COMPARED_CALLS[peers.device.type]

    def step(self) -> list[Sequence]:
        """Call the model. Raises RunFailedError if the ranks have sampled different tokens."""
        ended = super().step()
        self._calls += 1
        if self._calls % self._every == 0 or not self.busy:
            self._peers.compare(self.sampled, self.checksum)
        return ended


class LeaderBatch(WrappedBatch):
    """Batch of the leader, which sends its calls to the other ranks."""

    def __init__(self, batch: RequestBatch, peers: SplitRanks) -> None:
        super().__init__(batch, peers)
        self._unsent: list[Call] = []
        self._together = True
        """Whether the other ranks wait for a message."""

    def add(self, request: GenerationRequest) -> list[Sequence]:
        sequences = super().add(request)
        if sequences:
            self._unsent.append(("add", asdict(request)))
        return sequences

    def abort(self, sequences: list[Sequence]) -> None:
        """End the sequences of one request."""
        for sequence in sequences[:1]:
            self._unsent.append(("abort", sequence.request.request_id))
        super().abort(sequences)

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        self._unsent.append(("renew", version, stale_cache))
        super().renew(version, stale_cache=stale_cache)

    def step(self) -> list[Sequence]:
        assert self._together, "the other ranks were released, or a call of the model has failed"
        self._send("step", self.sampled, self.checksum)
        self._together = False
        ended = super().step()
        self._together = True
        return ended

    def read_weights(self, name: str, folder: Path) -> None:
        """Let the other ranks read their parts of new weights. The leader reads its part, too."""
        self._send("read", name, str(folder))

    def end(self) -> None:
        """Let the other ranks return if they wait for a message."""
        if self._together:
            self._send("end")
            self._together = False

    def _send(self, *call: Any) -> None:
        calls, self._unsent = [*self._unsent, call], []
        self._peers.send(calls)


class FollowerBatch:
    """Batch of another rank, which repeats the leader's calls."""

    def __init__(
        self, batch: RequestBatch, peers: SplitRanks, read: Callable[[str, Path], None]
    ) -> None:
        """``read`` reads this rank's part of a named weight version from a folder."""
        self._batch, self._peers, self._read = batch, peers, read
        self._requests: dict[str, list[Sequence]] = {}

    def run(self) -> None:
        """Repeat the leader's calls until the leader sends ``end``.

        Raises RunFailedError if this rank has sampled other tokens than the leader.
        """
        while True:
            for name, *arguments in self._peers.receive():
                if name == "end":
                    return
                self._repeat(name, arguments)

    def _repeat(self, name: str, arguments: list[Any]) -> None:
        match name, arguments:
            case "add", [values]:
                request = GenerationRequest.from_values(values)
                self._requests[request.request_id] = self._batch.add(request)
            case "abort", [request_id]:
                self._batch.abort(self._requests.pop(request_id, []))
            case "renew", [version, stale_cache]:
                self._batch.renew(version, stale_cache=stale_cache)
            case "read", [version, folder]:
                self._read(version, Path(folder))
            case "step", [sampled, checksum]:
                self._step(sampled, checksum)
            case _:
                raise AssertionError(f"unknown call {name} {arguments}")

    def _step(self, sampled: int, checksum: int) -> None:
        batch = self._batch
        here, leader = (batch.sampled, batch.checksum), (sampled, checksum)
        if here != leader:
            raise other_tokens(self._peers.group.rank(), here, leader)
        for request_id in {sequence.request.request_id for sequence in batch.step()}:
            own = self._requests.get(request_id, ())
            if own and all(sequence.finish is not None for sequence in own):
                del self._requests[request_id]


def shared_batch(batch: RequestBatch, peers: SplitRanks | None, *, turns: bool) -> RequestBatch:
    """Return the batch with which a rank serves requests together with its ``peers``.

    With ``turns``, only the leader knows the requests. The other ranks keep their batch for
    `FollowerBatch`.
    """
    if peers is None:
        return batch
    if not turns:
        return ComparedBatch(batch, peers)
    return LeaderBatch(batch, peers) if peers.is_leader else batch
