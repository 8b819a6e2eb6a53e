"""Continuous batching on the ranks of a model that is split.

Each rank has a batch of its own. What a batch does depends on the calls of its methods and on the
sampled tokens only, and every rank samples the same tokens, because all have the whole logits. So
the leader sends its calls, in one broadcast for each call of the model, and the others repeat them.
Where all ranks know the requests beforehand, each makes the calls by itself, and they compare the
sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.generation.base import GenerationRequest
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.peers import Call, Peers, other_tokens
from slurmrl.rollouts.generation.native.schedule import Limits
from slurmrl.rollouts.generation.native.sequence import Sequence

COMPARED_CALLS = {"cpu": 1, "cuda": 8}
"""Calls of the model, by type of device, between two comparisons. Each waits for a GPU."""


class ComparedBatch(ContinuousBatch):
    """The batch of each rank where all ranks add the same requests."""

    def __init__(self, decoder: Decoder, limits: Limits, peers: Peers, **options: Any) -> None:
        super().__init__(decoder, limits, **options)
        self._peers, self._calls = peers, 0
        self._every = COMPARED_CALLS[peers.device.type]

    def step(self) -> list[Sequence]:
        """See `ContinuousBatch`. Raises RunFailedError if the ranks have sampled other tokens."""
        ended = super().step()
        self._calls += 1
        if self._calls % self._every == 0 or not self.busy:
            self._peers.compare(self.drawn, self.checksum)
        return ended


class LedBatch(ContinuousBatch):
    """The batch of the leader."""

    def __init__(self, decoder: Decoder, limits: Limits, peers: Peers, **options: Any) -> None:
        """The arguments of `ContinuousBatch` are the same on all ranks."""
        super().__init__(decoder, limits, **options)
        self._peers = peers
        self._unsent: list[Call] = []
        self._together = True
        """Whether the other ranks wait for the next message."""

    def add(self, request: GenerationRequest) -> list[Sequence]:
        sequences = super().add(request)
        if sequences:
            self._unsent.append(("add", asdict(request)))
        return sequences

    def abort(self, sequences: list[Sequence]) -> None:
        """``sequences`` are those of one request."""
        for sequence in sequences[:1]:
            self._unsent.append(("abort", sequence.request.request_id))
        super().abort(sequences)

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        self._unsent.append(("renew", version, stale_cache))
        super().renew(version, stale_cache=stale_cache)

    def step(self) -> list[Sequence]:
        assert self._together, "the other ranks were let go, or a call of the model has failed"
        self._send("step", self.drawn, self.checksum)
        self._together = False
        ended = super().step()
        self._together = True
        return ended

    def read_weights(self, name: str, folder: Path) -> None:
        """Have the other ranks read their parts of new weights; the leader must, too."""
        self._send("read", name, str(folder))

    def end(self) -> None:
        """Let the other ranks go, if they can still be reached."""
        if self._together:
            self._send("end")
            self._together = False

    def _send(self, *call: Any) -> None:
        calls, self._unsent = [*self._unsent, call], []
        self._peers.send(calls)


class RepeatedBatch:
    """The batch of another rank."""

    def __init__(
        self, batch: ContinuousBatch, peers: Peers, read: Callable[[str, Path], None]
    ) -> None:
        """``read`` reads this rank's part of the weights of a name from a folder."""
        self._batch, self._peers, self._read = batch, peers, read
        self._requests: dict[str, list[Sequence]] = {}

    def run(self) -> None:
        """Repeat the leader's calls until it ends.

        Raises RunFailedError if this rank has drawn other tokens than the leader.
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
            case "step", [drawn, checksum]:
                self._step(drawn, checksum)
            case _:
                raise AssertionError(f"unknown call {name} {arguments}")

    def _step(self, drawn: int, checksum: int) -> None:
        batch = self._batch
        here, leader = (batch.drawn, batch.checksum), (drawn, checksum)
        if here != leader:
            raise other_tokens(self._peers.group.rank(), here, leader)
        for request_id in {sequence.request.request_id for sequence in batch.step()}:
            own = self._requests.get(request_id, ())
            if own and all(sequence.finish is not None for sequence in own):
                del self._requests[request_id]
