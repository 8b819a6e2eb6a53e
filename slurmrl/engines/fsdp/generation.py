"""Generation by a decoder whose shards are gathered on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import PROMPTS, ServingEngine
from slurmrl.engines.fsdp.sharding import Shards
from slurmrl.engines.host import Offload
from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.generate import GenerationOptions, GenerationOutput, generate
from slurmrl.models.paged import attends_in_place
from slurmrl.rollouts.generation.native.peers import Peers
from slurmrl.rollouts.generation.native.rollout import NativeRollout
from slurmrl.rollouts.generation.native.schedule import Limits
from slurmrl.rollouts.generation.native.stops import Decode
from slurmrl.rollouts.generation.native.whole import generate_by_requests

ROWS = 256
"""Sequences of a whole batch that are extended at a time, where they are served as requests."""


class GatheredGeneration(ServingEngine):
    """The synchronous generation of the engines that hold the model in `Shards`."""

    _shards: Shards
    _offload: Offload
    _max_tokens: int
    """Tokens of prompts that are read at a time."""

    @property
    def serves_requests(self) -> bool:
        return isinstance(self.config, ModelConfig)

    @contextmanager
    def serving(
        self,
        version: str,
        *,
        rows: int,
        cache_bytes: int | None = None,
        decode: Decode | None = None,
    ) -> Iterator[NativeRollout | None]:
        """See `ServingEngine`. The weights stay gathered meanwhile, so no rank may call another
        method; every leader enters and leaves, with requests of its own or none.

        Raises UsageError for a model of transformers.
        """
        self._offload.check()
        with torch.no_grad(), self._shards.gathered() as decoder:
            if not isinstance(decoder, Decoder):
                raise UsageError(
                    f"{self.role}: 'implementation: hf' generates whole batches only; episodes "
                    "and single requests need the built-in decoder"
                )
            peers = self._peers()
            limits = self._limits(rows, cache_bytes)
            rollout = NativeRollout(
                decoder, limits=limits, version=version, decode=decode, own=False, peers=peers
            )
            if peers is not None and not peers.leads:
                rollout.follow()
                yield None
                return
            try:
                yield rollout
            finally:
                rollout.dismiss()

    def _peers(self) -> Peers | None:
        """The ranks that have the same samples as this one; None if there are no others."""
        context = self.context
        if "data" not in context.groups:
            return None
        return Peers(context.group("data"), context.device)

    def generate(
        self,
        sample: SequenceSample,
        options: GenerationOptions,
        *,
        seed: int,
        step: int,
        keys: Tensor,
        decode: Decode | None = None,
    ) -> GenerationOutput:
        self._offload.check()
        sample = sample.to(self.context.device)
        batch = (sample.tensor(PROMPTS), sample.cu_seqlens(PROMPTS), options)
        keys = keys.to(self.context.device)
        peers = self._peers()
        compare = None if peers is None else peers.compare
        with torch.no_grad(), self._shards.gathered() as decoder:
            limits = self._limits(ROWS)
            if isinstance(decoder, Decoder) and (
                options.stop_strings
                or options.experts
                or _pages_pay(decoder, limits.page_tokens, peers)
            ):
                return generate_by_requests(
                    decoder,
                    *batch,
                    seed=seed,
                    step=step,
                    keys=keys,
                    limits=limits,
                    compare=compare,
                    decode=decode,
                )
            return generate(
                decoder,
                *batch,
                seed=seed,
                step=step,
                keys=keys,
                prefill_tokens=self._max_tokens,
                compare=compare,
            )

    def _limits(self, rows: int, cache_bytes: int | None = None) -> Limits:
        tokens = max(rows, self._max_tokens)
        return Limits(rows=rows, step_tokens=tokens, cache_bytes=cache_bytes)


def _pages_pay(decoder: Decoder, page: int, peers: Peers | None) -> bool:
    """Whether a cache in pages is faster than one slab for all rows: where no rank has to copy it.
    Ranks that hold one model agree, since they generate in the same way."""
    pays = attends_in_place(decoder, page)
    return pays if peers is None else all(peers.answers(int(pays)))
