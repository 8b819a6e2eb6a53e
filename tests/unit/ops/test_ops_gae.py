"""Packed GAE against a float64 loop written from the definition."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.ops.gae import packed_gae

Sequences = list[tuple[list[float], list[float], bool]]
"""(rewards, values with one more for the state behind the end, bootstrap) of each sequence."""


def by_definition(
    rewards: list[float], values: list[float], bootstrap: bool, gamma: float, lam: float
) -> list[float]:
    """sum_i (gamma lam)^i (r_{t+i} + gamma V_{t+i+1} - V_{t+i}), term by term."""
    n = len(rewards)
    following = [*values[1:n], values[n] if bootstrap else 0.0]
    advantages = []
    for t in range(n):
        total = 0.0
        for i in range(n - t):
            delta = rewards[t + i] + gamma * following[t + i] - values[t + i]
            total += (gamma * lam) ** i * delta
        advantages.append(total)
    return advantages


def pack(sequences: Sequences, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor([x for rewards, _, _ in sequences for x in rewards], dtype=dtype),
        torch.tensor([x for _, values, _ in sequences for x in values], dtype=dtype),
        torch.tensor([0, *accumulate(len(r) for r, _, _ in sequences)], dtype=torch.int32),
        torch.tensor([bootstrap for _, _, bootstrap in sequences]),
    )


numbers = st.floats(-3, 3, allow_subnormal=False)


@st.composite
def sequence(draw: st.DrawFn) -> tuple[list[float], list[float], bool]:
    n = draw(st.integers(0, 40))
    rewards = draw(st.lists(numbers, min_size=n, max_size=n))
    values = draw(st.lists(numbers, min_size=n + 1, max_size=n + 1))
    return rewards, values, draw(st.booleans())


@settings(deadline=None)
@given(
    st.lists(sequence(), min_size=1, max_size=6),
    st.floats(0, 1, allow_subnormal=False),
    st.floats(0, 1, allow_subnormal=False),
)
def test_it_is_the_definition(sequences: Sequences, gamma: float, lam: float) -> None:
    advantages, returns = packed_gae(*pack(sequences, torch.float64), gamma, lam)
    wanted = [a for r, v, b in sequences for a in by_definition(r, v, b, gamma, lam)]
    before = [value for rewards, values, _ in sequences for value in values[: len(rewards)]]
    torch.testing.assert_close(advantages, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(
        returns, advantages + torch.tensor(before, dtype=torch.float64), rtol=0, atol=0
    )


def test_long_sequences_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 1000, 2500, 7]
    sequences = [
        (
            torch.randn(n, generator=generator).tolist(),
            torch.randn(n + 1, generator=generator).tolist(),
            n % 2 == 0,
        )
        for n in lengths
    ]
    advantages, _ = packed_gae(*pack(sequences, torch.float32), 0.99, 0.95)
    wanted = []
    for rewards, values, bootstrap in sequences:
        following, carry, part = [*values[1:-1], values[-1] if bootstrap else 0.0], 0.0, []
        for t in reversed(range(len(rewards))):
            carry = rewards[t] + 0.99 * following[t] - values[t] + 0.99 * 0.95 * carry
            part.append(carry)
        wanted += part[::-1]
    torch.testing.assert_close(
        advantages.double(), torch.tensor(wanted).double(), atol=1e-4, rtol=1e-4
    )


def test_without_discount_the_return_is_what_is_still_to_come() -> None:
    rewards, values = [0.5, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4]
    _, ended = packed_gae(*pack([(rewards, values, False)], torch.float64), 1.0, 1.0)
    _, cut = packed_gae(*pack([(rewards, values, True)], torch.float64), 1.0, 1.0)
    assert ended.tolist() == pytest.approx([1.5, 1.0, 1.0])
    assert cut.tolist() == pytest.approx([1.9, 1.4, 1.4])


def test_inputs_are_left_alone() -> None:
    packed = pack([([1.0, 2.0], [0.1, 0.2, 0.3], False)], torch.float32)
    copies = [tensor.clone() for tensor in packed]
    packed_gae(*packed, 0.9, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(packed, copies, strict=True))
