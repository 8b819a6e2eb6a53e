"""What SFT trains on, for readers of samples: the rows as the model sees them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.token_notes import token_notes, token_texts
from slurmrl.data.sample import SequenceSample

FIRST, EVERY = 10, 100
"""The first steps, and every how many of the others, of which samples are kept: steps of SFT may be
short and many, and each has a file of its own."""
LONGEST = 20_000
"""Characters of a text that are kept: rows of SFT may be as long as the model's context."""


def rows_of(sample: SequenceSample, context: CallContext) -> list[dict[str, Any]]:
    """Rows of the samples table: the first `logging.samples` sequences, of which the completion
    begins with the first token of an answer, with the tokens outside of the loss. None in most
    steps."""
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
