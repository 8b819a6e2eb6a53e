"""Functions that ranks run in the tests of shared prefixes: see ``cases``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs
from tests.distributed.engines.cases import ARCHITECTURE, Setup, denominator, loss, make

PROMPTS = (19, 24, 2, 31)
COMPLETIONS = ((3, 7, 3), (1, 5), (4, 1, 6), (8, 2, 2, 9))
"""Tokens of each completion of each prompt. The third prompt is too short to be shared."""
TOKENS = sum(p * len(c) + sum(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True))
READ = TOKENS - 2 * 19 - 24 - 3 * 31
"""Tokens that are read if each prompt is read once."""
RESTS = 3 + 2 + 4
"""Sequences behind shared prompts."""


def group_batch() -> SequenceSample:
    """Items with the sequences of one prompt each."""
    draw = torch.Generator().manual_seed(11)
    vocabulary = int(ARCHITECTURE["vocab_size"])  # type: ignore[call-overload]
    sequences: list[Tensor] = []
    for tokens, lengths in zip(PROMPTS, COMPLETIONS, strict=True):
        prompt = torch.randint(vocabulary, (tokens,), generator=draw)
        for first, length in enumerate(lengths):  # completions have different first tokens
            rest = torch.randint(vocabulary, (length - 1,), generator=draw)
            sequences.append(torch.cat([prompt, torch.tensor([first]), rest]))
    ids = torch.cat(sequences)
    assert ids.shape[0] == TOKENS
    return SequenceSample.grouped(
        [[p + length for length in c] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)],
        [f"item{index}" for index in range(len(PROMPTS))],
        {
            "input_ids": ids,
            "advantages": torch.randn(TOKENS, generator=draw),
            "returns": torch.randn(TOKENS, generator=draw),
        },
    )


def train_groups(
    setup: Setup, separate: bool, save: Path | None = None
) -> tuple[Outputs, dict[str, float], list[int]]:
    """Return outputs, the statistics of a step, and the tokens that the layers read in each forward
    pass. With ``separate``, each sequence is an item.
    """
    engine = make(setup)
    sample = group_batch().take(setup.split[engine.context.dp_rank])
    if separate:
        sample = sample.sequences()
    read: list[int] = []

    def note(_: Any, inputs: tuple[Tensor, ...]) -> None:
        read.append(inputs[0].shape[0])

    first = next(iter(engine._shards.decoder.layers))  # type: ignore[attr-defined]
    first.self_attn.q_proj.register_forward_pre_hook(note)
    outputs = engine.forward(sample)
    stats = engine.train_batch(sample, loss, denominator(sample))
    if save is not None:
        engine.save(save)
    return outputs, stats, read
