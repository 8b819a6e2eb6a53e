"""Requests served by one model, or by the ranks of a model that is split."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.rollouts.generation.batch_rollout import BatchRollout, RequestBatch
from slurmrl.rollouts.generation.native.split_batch import (
    FollowerBatch,
    LeaderBatch,
    SplitRanks,
    shared_batch,
)


class ReadOutcome(IntEnum):
    """The result of reading new weights on a rank."""

    READ = 0
    REJECTED = 1
    """The weights are of another architecture; the old weights are unchanged."""
    BROKEN = 2


class SplitRollout(BatchRollout):
    """Serves requests with a batch, which ``peers`` compute together.

    Each rank makes an engine with the same arguments. The leader's engine serves, and the others
    call ``follow``. Without ``turns``, all ranks serve the same requests.
    """

    def __init__(
        self,
        batch: RequestBatch,
        version: str | None,
        *,
        stale_cache: bool,
        peers: SplitRanks | None,
        turns: bool,
    ) -> None:
        """``batch`` is the rank's own; ``version``, ``stale_cache``: see `BatchRollout`."""
        super().__init__(version, stale_cache=stale_cache)
        self._batch, self._peers = shared_batch(batch, peers, turns=turns), peers
        if version is not None and (peers is None or peers.is_leader or not turns):
            self._batch.renew(version)

    @abstractmethod
    def _read_own(self, folder: Path) -> None:
        """Read this rank's part of weights.

        Raises UsageError, and changes nothing, if the folder has another architecture.
        """

    def _read(self, name: str, folder: Path) -> None:
        """Read weights.

        If reading breaks off, or succeeds only on some ranks, the decoder has parts of two
        versions, and the engine is lost.
        """
        if isinstance(self._batch, LeaderBatch):
            self._batch.read_weights(name, folder)
        error: UsageError | OSError | CorruptFileError | None = None
        try:
            self._read_own(folder)
        except (UsageError, OSError, CorruptFileError) as raised:
            error = raised
        outcomes = self._outcomes(error)
        if outcomes == {ReadOutcome.READ}:
            return
        if error is not None and outcomes == {ReadOutcome.REJECTED}:
            raise error
        reason = error or "other ranks of the model failed"
        raise self._lose(name, folder, reason) from error

    def _outcomes(self, error: Exception | None) -> set[int]:
        """Return the results of all ranks that read weights; this rank has an error or none."""
        own = ReadOutcome.READ
        if error is not None:
            own = ReadOutcome.REJECTED if isinstance(error, UsageError) else ReadOutcome.BROKEN
        return {own} if self._peers is None else set(self._peers.answers(own))

    async def close(self) -> None:
        self.dismiss()
        await super().close()

    def follow(self) -> None:
        """Compute the requests of the leader's engine, until it is closed or dismisses this rank.

        Raises RuntimeError if the leader has ended.
        """
        assert self._peers is not None, "a rank alone has no leader"
        assert not self._peers.is_leader, "the leader serves requests"

        def read(name: str, folder: Path) -> None:
            with suppress(UsageError):  # the leader's caller gets this error; nothing has changed
                self._read(name, folder)

        FollowerBatch(self._batch, self._peers, read).run()

    def dismiss(self) -> None:
        """Let the other ranks of the model return from ``follow``. This ends all sampling."""
        if isinstance(self._batch, LeaderBatch) and self._lost is None:
            self._batch.end()
