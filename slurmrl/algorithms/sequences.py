"""Quantities of whole sequences, and steps that train on a whole batch at once.

T packed tokens, S sequences. An item may have several sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.data.meta import Lengths
from slurmrl.data.sample import SequenceSample
from slurmrl.tensors.ops.arguments import upload

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn, TrainEngine


TOKENS = "input_ids"


@dataclass(frozen=True)
class Sequences:
    """The assignment of tokens to sequences."""

    index: Tensor
    """[T] the number of each token's sequence."""
    count: int
    """S."""

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> Sequences:
        """``cu_seqlens`` [S+1] in host memory; the result is on ``device``."""
        lengths = cu_seqlens.diff().long()
        (index,) = upload([torch.arange(len(lengths)).repeat_interleave(lengths)], device)
        return Sequences(index, len(lengths))

    def sums(self, x: Tensor) -> Tensor:
        """[S]: the sum of x [T] over each sequence."""
        return x.new_zeros(self.count).index_add(0, self.index, x)

    def spread(self, x: Tensor) -> Tensor:
        """[T]: at each token, the entry of x [S] of its sequence."""
        return x[self.index]

    def totals(self, x: Tensor) -> Tensor:
        """Return [T]: at each token, the sum of x [T] over its sequence."""
        return self.spread(self.sums(x))

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return [T]: at each token, the mean of x [T] over its sequence's tokens in ``mask``.

        It is 0 in a sequence that has none.
        """
        counts = self.totals(mask.to(x.dtype)).clamp(min=1.0)
        return self.totals(torch.where(mask, x, 0.0)) / counts

    def maxima(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return [T]: at each token, the largest x [T] among its sequence's tokens in ``mask``.

        It is -inf in a sequence that has none.
        """
        selected = torch.where(mask, x, float("-inf"))
        found = selected.new_full((self.count,), float("-inf"))
        return self.spread(found.scatter_reduce(0, self.index, selected, "amax"))


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S]: the sums of ``values`` [T] over the tokens of each sequence that ``mask`` [T] selects.

    ``cu_seqlens`` [S+1] is in host memory.
    """
    lengths = cu_seqlens.diff().long().to(values.device)
    numbers = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths)).index_add(0, numbers, torch.where(mask, values, 0.0))


def answer_logprobs(logp: Tensor, sample: SequenceSample) -> Tensor:
    """[S]: log p(answer | prompt) from the log-probabilities [T] of the sample's tokens."""
    mask = ~sample.tensor("prompt_mask").to(logp.device)
    return sequence_sums(logp, mask, sample.cu_seqlens(TOKENS))


def answer_lengths(sample: SequenceSample) -> Tensor:
    """[S]: the number of answer tokens of each sequence, at least 1."""
    mask = ~sample.tensor("prompt_mask")
    return sequence_sums(mask.float(), mask, sample.cu_seqlens(TOKENS)).clamp(min=1.0)


def last_values(values: Tensor, sample: SequenceSample) -> Tensor:
    """[S]: the values [T] at the last token of each sequence."""
    last = sample.cu_seqlens(TOKENS)[1:].long() - 1
    return values[last.to(values.device)]


def row_id(sample_id: str) -> str:
    """Return the id of the row of a sample ``<id>@<epoch>``; each row occurs once."""
    return sample_id.rpartition("@")[0]


def nth_sequences(sample: SequenceSample, nth: int) -> SequenceSample:
    """The sample with only the ``nth`` sequence of each item.

    Keys with fewer sequences an item are left out.
    """
    lengths: Lengths = {}
    data: dict[str, Tensor | None] = {}
    for key, rows in sample.lengths.items():
        if any(len(item) <= nth for item in rows):
            continue
        tensor = sample.tensor(key)
        chosen = torch.tensor([at == nth for item in rows for at in range(len(item))]).bool()
        kept = torch.repeat_interleave(chosen, sample.cu_seqlens(key).diff())
        lengths[key] = [[item[nth]] for item in rows]
        data[key] = tensor[kept.to(tensor.device)]
    return SequenceSample(sample.ids, lengths, data=data)


def per_sequence(sample: SequenceSample, key: str, values: Tensor) -> SequenceSample:
    """The sample's items with one value [S] for each sequence."""
    lengths = [[1] * len(item) for item in sample.lengths[TOKENS]]
    return SequenceSample(sample.ids, {key: lengths}, data={key: values})


def train_on_batch(
    engine: TrainEngine,
    sample: SequenceSample,
    loss_fn: LossFn,
    denominator: float,
    *,
    temperature: float = 1.0,
) -> tuple[dict[str, float], dict[str, float]]:
    """Make one optimizer step.

    Return the metrics of every training step, and the sums of the loss function's statistics over
    all ranks, with the ``denominator``'s.
    """
    result = engine.train_batch(sample, loss_fn, denominator, temperature=temperature)
    means = {key: result[key] for key in ("loss", "grad_norm", "lr", "skipped")}
    return {key: mean for key, mean in means.items() if isfinite(mean)}, result


def global_means(means: Mapping[str, float]) -> CallResult:
    """The result of a train_step from means that are the same on every rank."""
    return CallResult(stats={key: (mean, 1.0) for key, mean in means.items()})


class ReferenceInterface(Interface):
    """Interface for a frozen model's log-probabilities of answers."""

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``ref_logps``: log p(answer | prompt) of each sequence."""
        assert engine is not None
        outputs = engine.forward(sample.only([TOKENS]))
        sums = answer_logprobs(outputs["logp"], sample)
        return CallResult(per_sequence(sample, "ref_logps", sums))
