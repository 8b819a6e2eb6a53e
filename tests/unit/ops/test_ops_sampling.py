from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.sampling import joined, sample, stream, stream_uniform


def splitmix(x: int) -> int:
    """Return SplitMix64 computed with plain integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def keyed_uniform(seed: int, step: int, keys: Tensor, position: Tensor | int) -> Tensor:
    """Return a number for each of the keys."""
    streams = torch.tensor([stream(seed, step, key) for key in keys.tolist()])
    return stream_uniform(streams, position)


def uniforms(count: int, position: int = 0) -> Tensor:
    return keyed_uniform(1, 2, torch.arange(count), position)


def test_splitmix_equals_the_published_algorithm() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF  # first output of the reference code for seed 0


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, -3])
def test_random_numbers_equal_plain_integer_arithmetic(seed: int) -> None:
    keys = torch.tensor([0, 5, -1, 2**62, -(2**63)])
    positions = torch.tensor([3, 0, 9, 1, 2])
    numbers = keyed_uniform(seed, 4, keys, positions)
    assert numbers.dtype == torch.float64
    mask = 2**64 - 1
    for number, key, position in zip(
        numbers.tolist(), keys.tolist(), positions.tolist(), strict=True
    ):
        state = splitmix(splitmix(splitmix(seed & mask) ^ 4) ^ (key & mask))
        assert number == (splitmix(state ^ position) >> 11) / 2**53


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    grid = torch.stack([uniforms(4000, position) for position in range(5)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = torch.histc(grid.flatten().float(), bins=20, min=0, max=1)
    expected = grid.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 19 degrees: p < 0.001
    correlations = torch.corrcoef(grid) - torch.eye(5)
    assert correlations.abs().max() < 0.06
    assert (grid[:, :-1] * grid[:, 1:]).mean() - 0.25 < 0.01


def test_random_number_depends_on_each_of_its_four_keys() -> None:
    keys = torch.tensor([3, 4])
    base = keyed_uniform(1, 2, keys, 5)
    assert base[0] != base[1]
    for other in (
        keyed_uniform(9, 2, keys, 5),
        keyed_uniform(1, 9, keys, 5),
        keyed_uniform(1, 2, keys, 9),
        keyed_uniform(2, 1, keys, 5),
    ):
        assert torch.all(base != other)
    assert torch.equal(keyed_uniform(1, 2, keys.flip(0), 5), base.flip(0))


def frequencies(logits: Tensor, **options: object) -> Tensor:
    draws = 40000
    tokens, _, _ = sample(logits.expand(draws, -1), uniforms(draws), **options)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([1.0, -2.0, 3.0, 0.5, 2.9, -30.0, 1.0])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sampled_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert (frequencies(LOGITS, temperature=temperature) - expected).abs().max() < 0.01


def test_top_k_keeps_the_k_most_likely() -> None:
    expected = LOGITS.softmax(-1) * torch.tensor([0, 0, 1, 0, 1, 0, 0])
    seen = frequencies(LOGITS, top_k=2)
    assert (seen - expected / expected.sum()).abs().max() < 0.01
    assert seen[[0, 1, 3, 5, 6]].sum() == 0
    assert torch.equal(frequencies(LOGITS, top_k=99), frequencies(LOGITS))


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    probabilities = LOGITS.softmax(-1)  # token 2: 0.44, token 4: 0.40, tokens 0 and 6: 0.06 each
    for top_p, kept in ((0.3, [2]), (0.5, [2, 4]), (0.87, [2, 4, 0]), (0.93, [2, 4, 0, 6])):
        seen = frequencies(LOGITS, top_p=top_p)
        assert sorted(seen.nonzero().squeeze(-1).tolist()) == sorted(kept)
        expected = torch.zeros(7)
        expected[kept] = probabilities[kept] / probabilities[kept].sum()
        assert (seen - expected).abs().max() < 0.01


def test_top_p_applies_to_tokens_kept_by_top_k() -> None:
    assert frequencies(LOGITS, top_k=2, top_p=0.5).nonzero().tolist() == [[2]]


def test_greedy_takes_the_most_probable_allowed_token() -> None:
    tokens, _, _ = sample(LOGITS[None], uniforms(1), greedy=True)
    assert tokens.tolist() == [2]
    tokens, _, _ = sample(LOGITS[None], uniforms(1), greedy=True, banned=torch.tensor([2, 0]))
    assert tokens.tolist() == [4]


def test_banned_tokens_are_never_sampled() -> None:
    seen = frequencies(LOGITS, banned=torch.tensor([2, 4]))
    assert seen[[2, 4]].sum() == 0
    allowed = LOGITS.softmax(-1) * torch.tensor([1, 1, 0, 1, 0, 1, 1])
    assert (seen - allowed / allowed.sum()).abs().max() < 0.01


def test_logprobs_are_relative_to_the_full_distribution() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.8, "banned": torch.tensor([1])}
    tokens, logp, _ = sample(logits, uniforms(50), **options)
    expected = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    assert (logp - expected).abs().max() < 1e-6


def test_random_numbers_at_interval_ends_give_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]]).expand(2, -1)
    tokens, _, _ = sample(logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 3]


def test_kept_tokens_are_recorded_as_sampling_mask() -> None:
    """Of equally likely tokens, those with lower ids are kept."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -torch.inf], [5.0, 0.0, 0.0, 0.0, 4.0, 0.0]])
    options = {"record": True, "masked": True}
    drawn = sample(logits, uniforms(2), top_k=3, **options)
    assert drawn.masks.tolist() == [[1, 2, 3], [0, 1, 4]]
    nucleus = sample(logits, uniforms(2), top_k=3, top_p=0.7, **options)
    assert nucleus.masks.tolist() == [[-1, 1, 2], [-1, -1, 0]]
    banned = sample(logits, uniforms(2), top_k=3, banned=torch.tensor([1, 0]), **options)
    assert banned.masks.tolist() == [[2, 3, 4], [2, 3, 4]]
    wide = sample(logits, uniforms(2), top_k=8, **options)
    assert wide.masks.tolist() == [[-1, -1, -1, 0, 1, 2, 3, 4], [-1, -1, 0, 1, 2, 3, 4, 5]]
    for one in (drawn, nucleus, banned, wide):
        assert one.masks is not None
        assert (one.masks == one.tokens[:, None]).any(1).all()
    assert sample(logits, uniforms(2), top_k=3).masks is None
    assert sample(logits, uniforms(2), top_k=3, greedy=True, **options).masks is None


def test_joined_samples_have_masks_only_if_a_sample_has_masks() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    plain, recorded = (
        sample(logits, uniforms(1), top_k=2, record=record) for record in (False, True)
    )
    assert joined([plain, plain]).masks is None
    mixed = joined([plain, recorded]).masks
    assert mixed is not None
    assert mixed.tolist() == [[-1, -1], [1, 2]]
