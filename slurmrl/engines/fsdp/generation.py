"""Generation by a decoder whose shards are gathered on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import PROMPTS, ServingEngine
from slurmrl.engines.fsdp.sharding import Shards
from slurmrl.engines.offload import Offload
from slurmrl.engines.rollout.native.rollout import NativeRollout
from slurmrl.engines.rollout.native.schedule import Limits
from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.generate import GenerationOptions, GenerationOutput, generate


class GatheredGeneration(ServingEngine):
    """The synchronous generation of the engines that hold the model in `Shards`."""

    _shards: Shards
    _offload: Offload
    _max_tokens: int
    """Tokens of prompts that are read at a time."""

    @property
    def serves_requests(self) -> bool:
        return isinstance(self.config, ModelConfig) and "data" not in self.context.groups

    @contextmanager
    def serving(self, version: str, *, cache_bytes: int | None = None) -> Iterator[NativeRollout]:
        """See `ServingEngine`. The weights stay gathered meanwhile, so no rank may call another
        method; every data-parallel rank enters and leaves, with requests of its own or none.

        Raises UsageError for a model of transformers or one that is split over tensor ranks.
        """
        self._offload.check()
        with torch.no_grad(), self._shards.gathered() as decoder:
            if not isinstance(decoder, Decoder):
                raise UsageError(
                    f"{self.role}: 'implementation: hf' generates whole batches only; episodes "
                    "and single requests need the built-in decoder"
                )
            rows = min(Limits().rows, self._max_tokens)
            limits = Limits(rows=rows, step_tokens=self._max_tokens, cache_bytes=cache_bytes)
            yield NativeRollout(decoder, limits=limits, version=version, own=False)

    def generate(
        self,
        sample: SequenceSample,
        options: GenerationOptions,
        *,
        seed: int,
        step: int,
        keys: Tensor,
    ) -> GenerationOutput:
        self._offload.check()
        sample = sample.to(self.context.device)
        with torch.no_grad(), self._shards.gathered() as decoder:
            return generate(
                decoder,
                sample.tensor(PROMPTS),
                sample.cu_seqlens(PROMPTS),
                options,
                seed=seed,
                step=step,
                keys=keys.to(self.context.device),
                prefill_tokens=self._max_tokens,
            )
