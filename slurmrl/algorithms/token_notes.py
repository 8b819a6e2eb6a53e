"""Strings and values of single tokens of the kept completions, for the samples table.

The call that scores completions adds the strings, other calls add the values (`CallResult.notes`).
Both begin with the first token that the policy wrote. R is the number of such tokens and of tokens
between turns, at most ``logging.sample_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slurmrl.config.schema import Logging
from slurmrl.data.sample import SequenceSample

UNFINISHED = "\ufffd"
"""Replacement of a character whose tokens are incomplete."""
DIGITS = 4


class Noted(NamedTuple):
    """A kept completion."""

    item: int
    """Position of its item in the rank's sample."""
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
    """Yield the completions of which token values are kept: `kept`, or none."""
    return kept(counts, settings) if settings.sample_tokens else iter(())


def token_notes(
    sample: SequenceSample, values: Mapping[str, Tensor], trained: Tensor, settings: Logging
) -> list[dict[str, Any]]:
    """Return which tokens [R] the losses leave out (``masked``), and the ``values`` by name.

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
    """Return row fields of the kept completions: the strings of the tokens [R], and how many more.

    Special tokens are included.
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
    """Return the values of tensors of one dimension; the host waits for the device once."""
    values = torch.cat([each.double() for each in tensors]).tolist()
    cuts = [0, *accumulate(map(len, tensors))]
    return [values[start:stop] for start, stop in pairwise(cuts)]


def _span(read: Sequence[float], start: int, stop: int, settings: Logging) -> tuple[int, int]:
    first = next((place for place in range(start, stop) if not read[place]), stop)
    return first, min(stop, first + settings.sample_tokens)


def pieces(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return a string for each token; concatenated, they decode all tokens.

    A token that ends within a character has an empty string, and the token that completes the
    character has the whole character.
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
