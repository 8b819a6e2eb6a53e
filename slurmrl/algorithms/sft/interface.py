"""SFT's training step and held-out loss."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.sequences import sequence_sums
from slurmrl.algorithms.sft.shown import rows_of
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class SFTInterface(Interface):
    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """One update with the mean cross entropy of the answers' tokens."""
        assert engine is not None
        tokens = float((~sample.tensor("prompt_mask")).sum())
        result = engine.train_batch(sample, sft_loss, tokens)
        means = {key: result[key] for key in ("loss", "grad_norm", "lr", "skipped")}
        stats = {key: (x, 1.0) for key, x in means.items() if isfinite(x)}
        return CallResult(stats=stats, texts=rows_of(sample, context))

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The held-out ``loss`` per answer token, with the log-probability and the number of tokens
        of each answer; no output keys."""
        assert engine is not None
        outputs = engine.forward(sample.only(["input_ids"]))
        logp, ends = outputs["logp"], sample.cu_seqlens("input_ids")
        mask = ~sample.tensor("prompt_mask").to(logp.device)
        loss = cross_entropy(logp, mask)
        sums = sequence_sums(logp, mask, ends).tolist()
        tokens = sequence_sums(mask.float(), mask, ends).tolist()
        return CallResult(
            stats={"loss": (float(loss), float(mask.sum()))},
            records={
                name: {"logprob": logprob, "tokens": int(count)}
                for name, logprob, count in zip(sample.ids, sums, tokens, strict=True)
            },
        )


def sft_loss(outputs: dict[str, Tensor], batch: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]."""
    return cross_entropy(outputs["logp"], ~batch.tensor("prompt_mask")), {}


def cross_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """Sum of -log p over the tokens that ``mask`` selects; both are [T] and aligned."""
    return -torch.where(mask, logp, 0.0).sum()
