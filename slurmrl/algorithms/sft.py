"""SFT: the training step, the held-out loss, and the rows in the samples table."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.sequences import sequence_sums, token_notes, token_texts
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


FIRST, EVERY = 10, 100
"""Number of first steps, and interval of later steps, whose samples are kept: SFT may have many
short steps."""
LONGEST = 20_000
"""Maximum number of characters of a string that are kept: rows of SFT may be as long as the model's
context."""


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
        """Return the held-out ``loss`` per answer token; no output keys.

        The records have the log-probability and the number of tokens of each answer.
        """
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
    """Return the sum of -log p over the tokens that ``mask`` selects; both are [T] and aligned."""
    return -torch.where(mask, logp, 0.0).sum()


def rows_of(sample: SequenceSample, context: CallContext) -> list[dict[str, Any]]:
    """Return rows of the samples table; none in most steps.

    They are the first `logging.samples` sequences. The completion of a row begins with the first
    token of an answer. The row notes the tokens outside of the loss.
    """
    kept = context.settings.config.logging
    if context.step > FIRST and context.step % EVERY:
        return []
    sample = sample.slice(0, min(kept.samples, len(sample.ids)))
    everything = torch.ones(len(sample.ids), dtype=torch.bool)
    told = zip(
        token_texts(sample, kept, context.tokenizer),
        token_notes(sample, {}, everything, kept),
        strict=True,
    )
    tokens = [{**texts, "values": note["values"]} for texts, note in told]
    ids, read = (sample.tensor(key).tolist() for key in ("input_ids", "prompt_mask"))
    rows = []
    for number, (start, stop) in enumerate(pairwise(sample.cu_seqlens("input_ids").tolist())):
        first = next((at for at in range(start, stop) if not read[at]), stop)
        row = {
            "id": sample.ids[number],
            "prompt": _cut(context.tokenizer.decode(ids[start:first])),
            "completion": _cut(context.tokenizer.decode(ids[first:stop])),
        }
        rows.append(row | (tokens[number] if tokens else {}))
    return rows


def _cut(decoded: str | list[str]) -> str:
    text = str(decoded)
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]} … ({left} more characters)"
