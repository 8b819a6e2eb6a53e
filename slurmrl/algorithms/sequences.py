"""Quantities of whole sequences, steps that train on a whole batch, notes for the samples table.

For kept completions, notes contain the string and the values of each token. The call that scores
completions adds the strings, and other calls add the values (`CallResult.notes`). Both lists begin
with the first token that the policy wrote, and have at most ``logging.sample_tokens`` tokens: R
tokens.

T is the number of packed tokens and S the number of sequences. An item may have several sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.config.schema import Logging
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
    """[T] number of each token's sequence."""
    count: int
    """Number of sequences, S."""

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> Sequences:
        """Make the assignment on ``device`` from ``cu_seqlens`` [S+1] in host memory."""
        lengths = cu_seqlens.diff().long()
        (index,) = upload([torch.arange(len(lengths)).repeat_interleave(lengths)], device)
        return Sequences(index, len(lengths))

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums [S] of x [T] over each sequence."""
        return x.new_zeros(self.count).index_add(0, self.index, x)

    def spread(self, x: Tensor) -> Tensor:
        """Return, at each token [T], the entry of x [S] for its sequence."""
        return x[self.index]

    def totals(self, x: Tensor) -> Tensor:
        """Return, at each token [T], the sum of x [T] over its sequence."""
        return self.spread(self.sums(x))

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return, at each token [T], the mean of x [T] over its sequence's tokens in ``mask``.

        The mean is 0 in a sequence without tokens in ``mask``.
        """
        counts = self.totals(mask.to(x.dtype)).clamp(min=1.0)
        return self.totals(torch.where(mask, x, 0.0)) / counts

    def maxima(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return, at each token [T], the maximum of x [T] over its sequence's tokens in ``mask``.

        The maximum is -inf in a sequence without tokens in ``mask``.
        """
        selected = torch.where(mask, x, float("-inf"))
        found = selected.new_full((self.count,), float("-inf"))
        return self.spread(found.scatter_reduce(0, self.index, selected, "amax"))


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sums [S] of ``values`` [T] over each sequence's tokens in ``mask`` [T].

    ``cu_seqlens`` [S+1] is in host memory.
    """
    return Sequences.of(cu_seqlens, values.device).sums(torch.where(mask, values, 0.0))


def answer_logprobs(logp: Tensor, sample: SequenceSample) -> Tensor:
    """Return log p(answer | prompt) [S] from the log-probabilities [T] of the sample's tokens."""
    mask = ~sample.tensor("prompt_mask").to(logp.device)
    return sequence_sums(logp, mask, sample.cu_seqlens(TOKENS))


def answer_lengths(sample: SequenceSample) -> Tensor:
    """Return the number of answer tokens of each sequence [S], at least 1."""
    mask = ~sample.tensor("prompt_mask")
    return sequence_sums(mask.float(), mask, sample.cu_seqlens(TOKENS)).clamp(min=1.0)


def last_values(values: Tensor, sample: SequenceSample) -> Tensor:
    """Return the values at the last token of each sequence [S], from the values [T]."""
    last = sample.cu_seqlens(TOKENS)[1:].long() - 1
    return values[last.to(values.device)]


def row_id(sample_id: str) -> str:
    """Return the row's id ``<id>`` of a sample ``<id>@<epoch>``."""
    return sample_id.rpartition("@")[0]


def nth_sequences(sample: SequenceSample, nth: int) -> SequenceSample:
    """Return the sample with only the ``nth`` sequence of each item.

    Omit keys under which an item has at most ``nth`` sequences.
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
    """Return a sample with ``values`` [S], one for each sequence, under ``key``."""
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

    Return the metrics that every training step has, and the engine's result: the sums of the loss
    function's statistics and of ``denominator`` over all ranks.
    """
    result = engine.train_batch(sample, loss_fn, denominator, temperature=temperature)
    means = {key: result[key] for key in ("loss", "grad_norm", "lr", "skipped")}
    return {key: mean for key, mean in means.items() if isfinite(mean)}, result


def global_means(means: Mapping[str, float]) -> CallResult:
    """Return the result of a train_step from means that are the same on every rank."""
    return CallResult(stats={key: (mean, 1.0) for key, mean in means.items()})


class ReferenceInterface(Interface):
    """Interface for a frozen model's log-probabilities of answers."""

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``ref_logps``, log p(answer | prompt) of each sequence."""
        assert engine is not None
        outputs = engine.forward(sample.only([TOKENS]))
        sums = answer_logprobs(outputs["logp"], sample)
        return CallResult(per_sequence(sample, "ref_logps", sums))


UNFINISHED = "\ufffd"
"""Character to which tokenizers decode an incomplete character."""
DIGITS = 4


class Noted(NamedTuple):
    """A kept completion."""

    item: int
    """Position of the completion's item in the rank's sample."""
    place: int
    """Number of the completion within its item."""
    sequence: int
    """Number of the completion among all sequences of the sample."""


def kept(counts: Sequence[int], settings: Logging) -> Iterator[Noted]:
    """Yield the completions of a rank's first items until there are ``settings.samples``.

    An item is kept with all of its completions. ``counts`` are the numbers of completions of each
    item.
    """
    sequence = 0
    for item, count in enumerate(counts):
        if sequence >= settings.samples:
            return
        for place in range(count):
            yield Noted(item, place, sequence + place)
        sequence += count


def noted(counts: Sequence[int], settings: Logging) -> Iterator[Noted]:
    """Yield the completions of `kept`, or none if ``settings`` keep no values of tokens."""
    return kept(counts, settings) if settings.sample_tokens else iter(())


def token_notes(
    sample: SequenceSample, values: Mapping[str, Tensor], trained: Tensor, settings: Logging
) -> list[dict[str, Any]]:
    """Return notes: the ``values``, and as ``masked`` which tokens [R] the losses leave out.

    Each tensor [T] of ``values`` has an entry for every token of the sample. ``trained`` [S] bool
    marks the completions that are in the losses.
    """
    chosen = list(noted(sample.sequence_counts("input_ids"), settings))
    if not chosen:
        return []
    cuts = sample.cu_seqlens("input_ids")[: len(chosen) + 1].tolist()
    of_tokens = [value[: cuts[-1]] for value in (sample.tensor("prompt_mask"), *values.values())]
    counts, read, *rest = _on_host(trained[: len(chosen)], *of_tokens)
    columns = dict(zip(values, rest, strict=True))
    notes = []
    for one, (start, stop) in zip(chosen, pairwise(cuts), strict=True):
        first, last = _span(read, start, stop, settings)
        masked = [int(read[at] or not counts[one.sequence]) for at in range(first, last)]
        told = {"masked": masked} | {
            name: [float(f"{value:.{DIGITS}g}") for value in column[first:last]]
            for name, column in columns.items()
        }
        notes.append({"id": sample.ids[one.item], "index": one.place, "values": told})
    return notes


def token_texts(sample: SequenceSample, settings: Logging, tokenizer: Any) -> list[dict[str, Any]]:
    """Return fields for the rows of kept completions: the strings of the tokens [R].

    Special tokens are included. ``left_out`` is the number of omitted tokens.
    """
    chosen = list(noted(sample.sequence_counts("input_ids"), settings))
    if not chosen:
        return []
    cuts = sample.cu_seqlens("input_ids")[: len(chosen) + 1].tolist()
    keys = (sample.tensor(key)[: cuts[-1]] for key in ("input_ids", "prompt_mask"))
    ids, read = _on_host(*keys)
    found = []
    for start, stop in pairwise(cuts):
        first, last = _span(read, start, stop, settings)
        found.append(
            {"tokens": pieces(list(map(int, ids[first:last])), tokenizer), "left_out": stop - last}
        )
    return found


def _on_host(*tensors: Tensor) -> list[list[float]]:
    """Return 1-D tensors as lists; the host waits for the device only once."""
    values = torch.cat([each.double() for each in tensors]).tolist()
    cuts = [0, *accumulate(map(len, tensors))]
    return [values[start:stop] for start, stop in pairwise(cuts)]


def _span(read: Sequence[float], start: int, stop: int, settings: Logging) -> tuple[int, int]:
    first = next((place for place in range(start, stop) if not read[place]), stop)
    return first, min(stop, first + settings.sample_tokens)


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return a string for each token. The concatenated strings are the decoded tokens.

    A token that ends within a character gets an empty string. The token that completes the
    character gets the whole character.
    """
    texts: list[str] = []
    known, first = 0, 0
    for stop in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[first:known]) if known > first else ""
        text = tokenizer.decode(ids[first:stop])
        complete = stop == len(ids) or not text.endswith(UNFINISHED)
        texts.append(text[len(before) :] if complete else "")
        if complete:
            first, known = known, stop
    return texts
