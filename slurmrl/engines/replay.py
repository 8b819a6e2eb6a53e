"""What generation has recorded about the tokens of a sample, for models that compute them again."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import EXPERTS, IDS, SIZES
from slurmrl.engines.base import TOKENS
from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.routes import UNKNOWN
from slurmrl.tensors.ops.support import Support


def support_of(sample: SequenceSample | None) -> Support | None:
    """The supports of a sample's tokens; None if all were drawn from the whole vocabulary."""
    if sample is None or SIZES not in sample.keys:
        return None
    return Support.of(sample.tensor(SIZES), sample.tensor(IDS))


def experts_of(sample: SequenceSample | None, config: ModelConfig) -> Tensor | None:
    """The recorded experts, or `UNKNOWN`, of a sample's T tokens in the L blocks that have experts,
    K of each: [T, L, K]. None if there is no record."""
    if sample is None or EXPERTS not in sample.keys:
        return None
    blocks = 0 if config.moe is None else len(config.moe.layers)
    each = 0 if config.moe is None else config.moe.per_token
    width = blocks * each
    tokens = list(chain.from_iterable(sample.lengths[TOKENS]))
    sizes = list(chain.from_iterable(sample.lengths[EXPERTS]))
    if any(size not in (0, count * width) for size, count in zip(sizes, tokens, strict=True)):
        raise UsageError(
            f"the samples' experts are not those of a model with {blocks} blocks of experts"
        )
    parts = torch.split(sample.tensor(EXPERTS), sizes)
    rows: list[Tensor] = [
        part if len(part) else part.new_full((count * width,), UNKNOWN)
        for part, count in zip(parts, tokens, strict=True)
    ]
    experts = torch.cat(rows) if rows else sample.tensor(EXPERTS)
    return experts.view(sum(tokens), blocks, each)
