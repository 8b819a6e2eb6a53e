"""Requests served by a model of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slurmrl.engines.hf_batch import HFBatch
from slurmrl.rollouts.generation.base import Decode
from slurmrl.rollouts.generation.native.native_rollout import SplitRollout
from slurmrl.rollouts.generation.native.split_batch import SplitRanks

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel


async def _at_once() -> None:
    await asyncio.sleep(0)


class HFRollout(SplitRollout):
    """Serves requests in rounds, or continuously.

    A round computes the requests that wait at its beginning. With ``joins``, requests join running
    ones as soon as there is room.
    """

    def __init__(
        self,
        model: HFModel,
        version: str | None,
        prefill_tokens: int,
        *,
        rows: int | None = None,
        decode: Decode | None = None,
        support: bool = True,
        settled: Callable[[], Awaitable[None]] | None = None,
        joins: bool = False,
        stale_cache: bool = False,
        peers: SplitRanks | None = None,
        turns: bool = True,
    ) -> None:
        """``rows`` is the maximum number of completions at a time; None for no limit.

        ``version``, ``stale_cache``: see `BatchRollout`. ``decode``, ``support``, ``settled``: see
        `ServingOptions`. Rounds begin after ``settled`` returns. ``peers``, ``turns``: see
        `SplitRollout`.
        """
        self._model = model
        self._settled = settled or _at_once
        self._own = HFBatch(
            model, prefill_tokens, decode, support=support, most_rows=rows, joins=joins
        )
        super().__init__(self._own, version, stale_cache=stale_cache, peers=peers, turns=turns)

    async def _before_step(self) -> None:
        if not self._own.living:
            await self._settled()

    def _read_own(self, folder: Path) -> None:
        from slurmrl.models.hf_reading import read_weights  # transformers takes seconds to import

        read_weights(self._model, folder)
