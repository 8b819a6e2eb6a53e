"""Sequences that share prefixes, as pieces, against whole ones and transformers' own models."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.models.architecture import Head
from slurmrl.models.decoder import build
from slurmrl.models.layer_parts import Pieces
from slurmrl.models.recompute import Recompute
from tests.unit.models.conftest import small_decoder

PREFIXES = (6, 3)
RESTS = ((4, 1, 9), (4, 5))
"""Tokens of each sequence behind its prefix."""
ALONE = 7
"""Tokens of a sequence that shares nothing."""
LONGEST = 15


def drawn(tokens: int, seed: int) -> Tensor:
    return torch.randint(0, 37, (tokens,), generator=torch.Generator().manual_seed(seed))


def sequences() -> list[Tensor]:
    prefixes = [drawn(tokens, seed) for seed, tokens in enumerate(PREFIXES)]
    rests = [[drawn(n, 10 * n + row) for n in rest] for row, rest in enumerate(RESTS)]
    shared = [torch.cat([p, r]) for p, rest in zip(prefixes, rests, strict=True) for r in rest]
    return [shared[0], shared[1], drawn(ALONE, 5), *shared[2:]]


def in_pieces() -> tuple[Tensor, Pieces, Tensor]:
    """Tokens of the pieces, their boundaries, and where the tokens of the sequences are among them.

    Rests are before and behind their prefixes.
    """
    first, second, alone, third, fourth, fifth = sequences()
    long, short = PREFIXES
    parts = [
        first[long - 1 :],  # 0: a rest of piece 3
        fourth[:short],
        second[long - 1 :],
        first[:long],
        alone,
        fifth[short - 1 :],
        fourth[short - 1 :],
        third[long - 1 :],
    ]
    starts = [0, *accumulate(len(part) for part in parts)]
    pieces = Pieces(
        torch.tensor(starts, dtype=torch.int32), torch.tensor([3, -1, 3, -1, -1, 1, 1, 3])
    )
    places = [
        range(starts[piece] + skipped, starts[piece + 1])
        for piece, skipped in (
            *((3, 0), (0, 1)),
            *((3, 0), (2, 1)),
            (4, 0),
            *((3, 0), (7, 1)),
            *((1, 0), (6, 1)),
            *((1, 0), (5, 1)),
        )
    ]
    return torch.cat(parts), pieces, torch.tensor([place for part in places for place in part])


@pytest.mark.parametrize(
    ("name", "mode", "head"),
    [
        ("qwen3", "off", "lm"),
        ("qwen3", "selective", "lm"),
        ("qwen3", "full", "lm"),
        ("llama-llama3-rope", "off", "lm"),
        ("gemma", "selective", "value"),
        ("gpt2", "selective", "value"),
        ("mixtral", "off", "lm"),
        ("mixtral", "full", "value"),
    ],
)
def test_shared_prefixes_change_no_result_in_float64(
    name: str, mode: Recompute, head: Head
) -> None:
    """Outputs and gradients equal those of whole sequences; an output without gradients too."""
    config = small_decoder(name).config
    decoder = build(config, head).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    decoder.use(mode)
    ids, pieces, places = in_pieces()
    whole = sequences()
    cuts = [0, *accumulate(len(sequence) for sequence in whole)]
    weights = torch.randn((cuts[-1], 2), generator=generator).double()

    def outputs(*packing: Any) -> Tensor:
        features = decoder(*packing, LONGEST)
        if head == "value":
            return decoder.values(features)[:, None]
        tokens, boundaries = packing
        cu_seqlens = boundaries.cu_seqlens if isinstance(boundaries, Pieces) else boundaries
        return torch.stack(decoder.logprobs(features, tokens, cu_seqlens, 0.7), 1)

    def results(*packing: Any, of: Tensor) -> list[Tensor]:
        decoder.zero_grad()
        found = outputs(*packing)[of]
        (found * weights[:, : found.shape[1]]).sum().backward()  # type: ignore[no-untyped-call]
        return [found.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]

    everything = torch.arange(cuts[-1])
    wanted = results(torch.cat(whole), torch.tensor(cuts, dtype=torch.int32), of=everything)
    found = results(ids, pieces, of=places)
    assert len(found) == len(wanted) > 5
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-11 * max(1.0, float(other.abs().max()))
    with torch.no_grad():
        assert torch.equal(outputs(ids, pieces)[places], found[0])
