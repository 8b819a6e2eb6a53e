"""The turns of completions, from the tokens of whole sequences."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample


def last_turns(sample: SequenceSample) -> list[list[int]]:
    """The tokens of each completion's last turn, with the stop token that ended it; none of a
    failed episode."""
    ids, read = sample.tensor("input_ids").tolist(), sample.tensor("prompt_mask").tolist()
    cuts = sample.cu_seqlens("input_ids").tolist()
    turns = []
    for start, stop in pairwise(cuts):
        first = stop
        while first > start and not read[first - 1]:
            first -= 1
        turns.append(ids[first:stop])
    return turns


def earned(sample: SequenceSample) -> list[float]:
    """What the turns of each completion have earned together."""
    rewards = sample.tensor(TURN_REWARDS).double().cpu()
    parts = rewards.tensor_split(sample.cu_seqlens(TURN_REWARDS)[1:-1].long())
    return [float(part.sum()) for part in parts] if sample.bs else []


def transcript(sample: SequenceSample, number: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The turns of a completion and the texts between them, special tokens included."""
    start, stop = sample.cu_seqlens("input_ids")[number : number + 2].tolist()
    ids = sample.tensor("input_ids")[start:stop].tolist()
    read = sample.tensor("prompt_mask")[start:stop].tolist()
    rewards = sample.tensor(TURN_REWARDS)[start:stop].tolist()
    rows = []
    for is_read, places in groupby(range(len(ids)), read.__getitem__):
        at = list(places)
        if is_read and not at[0]:
            continue  # the prompt
        text = tokenizer.decode([ids[place] for place in at])
        if is_read:
            rows.append({"read": text})
        else:
            rows.append({"wrote": text, "reward": sum(rewards[place] for place in at)})
    return rows
