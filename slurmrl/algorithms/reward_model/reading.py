"""The token at which a reward model is read.

It is the token with which generation would have ended the answer: the first stop token of the last
turn that is the answer's, or its last token if there is none (a truncated completion). What a chat
template puts after the end of a turn, such as a newline after ``<|im_end|>``, is not read, because
a completion never has it.

Models without `SCORE_AT` in their config.json were trained on whole conversations as the template
renders them, so they are read at the last token of these. S sequences, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.sequences import TOKENS, last_values
from slurmrl.data.encoder import Encoder
from slurmrl.data.messages import ASSISTANT
from slurmrl.data.sample import SequenceSample
from slurmrl.data.types.base import expanded

READ = "prompt_mask"
"""Key without which only the last token of a sequence is known: of trials that slurmrl 1 has
planned."""


class TurnEnd(NamedTuple):
    """How a chat template ends the assistant's turn."""

    token: int
    """With which generation ends."""
    after: Sequence[int]
    """Tokens that follow in a whole conversation."""


def turn_end_values(values: Tensor, sample: SequenceSample, stops: Sequence[int]) -> Tensor:
    """[S]: the values [T] at the end of each sequence's last turn."""
    return values[turn_ends(sample, stops).to(values.device)]


def turn_ends(sample: SequenceSample, stops: Sequence[int]) -> Tensor:
    """[S]: the places in [T] at which generation would have ended the last turn. A sequence without
    a token of the model, of a failed episode, ends with its last one."""
    ids, read = sample.tensor(TOKENS), sample.tensor(READ)
    cuts = sample.cu_seqlens(TOKENS).long().to(ids.device)
    place = torch.arange(len(ids), device=ids.device)
    numbers = torch.arange(len(cuts) - 1, device=ids.device)
    owner = torch.repeat_interleave(numbers, cuts.diff())
    last = (cuts[:-1] - 1).scatter_reduce(0, owner, torch.where(read, -1, place), "amax")
    last = torch.where(last < cuts[:-1], cuts[1:] - 1, last)
    context = torch.where(read & (place < last[owner]), place, -1)
    before = (cuts[:-1] - 1).scatter_reduce(0, owner, context, "amax")
    # Some templates leave the end token outside of what they mark as the assistant's.
    turn = (place > before[owner]) & (place <= last[owner] + 1)
    stop = turn & torch.isin(ids, ids.new_tensor(stops))
    first = torch.full_like(last, len(ids))
    first = first.scatter_reduce(0, owner, torch.where(stop, place, len(ids)), "amin")
    return torch.where(first < len(ids), first, last)


def whole_conversations(sample: SequenceSample, context: CallContext) -> SequenceSample:
    """The tokens of completions as the end of whole conversations: with what the chat template of
    the dataset puts after the end of a turn. Truncated completions stay as they are."""
    sample = sample.only([TOKENS, READ])
    end = template_end(context)
    if end is None or not end.after:
        return sample.only([TOKENS])
    ids = sample.tensor(TOKENS)
    cuts = pairwise(sample.cu_seqlens(TOKENS).tolist())
    places = turn_ends(sample, context.stop_token_ids).tolist()
    parts = [
        torch.cat([ids[begin : place + 1], ids.new_tensor(end.after)])
        if ids[place] == end.token
        else ids[begin:stop]
        for (begin, stop), place in zip(cuts, places, strict=True)
    ]
    lengths = iter(map(len, parts))
    rows = [[next(lengths) for _ in item] for item in sample.lengths[TOKENS]]
    tokens = torch.cat(parts) if parts else ids
    return SequenceSample(sample.ids, {TOKENS: rows}, data={TOKENS: tokens})


def template_end(context: CallContext) -> TurnEnd | None:
    """How the chat template of the dataset ends a turn; None without one, or if the template
    refuses a plain conversation. Of several sources the first one with a template decides."""
    config = next((part for part in context.dataset.parts.values() if part.is_chat), None)
    if config is None:
        return None
    messages = [{"role": "user", "content": "Hello."}, {"role": ASSISTANT, "content": "Hello."}]
    (row,) = Encoder(config, context.tokenizer).conversations([(messages, None)])
    if isinstance(row, str):
        return None
    (sequence,) = row
    sample = SequenceSample.from_default(
        [len(sequence.tokens)],
        [""],
        {TOKENS: torch.tensor(sequence.tokens), READ: torch.tensor(expanded(sequence.runs))},
    )
    place = int(turn_ends(sample, context.stop_token_ids))
    return TurnEnd(sequence.tokens[place], list(sequence.tokens[place + 1 :]))


def pair_values(
    values: Tensor, sample: SequenceSample, stops: Sequence[int], *, turn_end: bool
) -> Tensor:
    """[S]: the scores of given answers, from the values [T] of their whole conversations."""
    if turn_end and READ in sample.keys:
        return turn_end_values(values, sample, stops)
    return last_values(values, sample)
