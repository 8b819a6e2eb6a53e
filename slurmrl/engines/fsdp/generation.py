"""Generation by a decoder whose shards are gathered on each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import PROMPTS, GenerateEngine
from slurmrl.engines.fsdp.sharding import Shards
from slurmrl.engines.offload import Offload
from slurmrl.models.generate import GenerationOptions, GenerationOutput, generate


class GatheredGeneration(GenerateEngine):
    """The synchronous generation of the engines that hold the model in `Shards`."""

    _shards: Shards
    _offload: Offload
    _max_tokens: int
    """Tokens of prompts that are read at a time."""

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
