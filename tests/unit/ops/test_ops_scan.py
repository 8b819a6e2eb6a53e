"""Sums and returns, compiled and in torch, against float64 loops."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.tensors.ops.scan import (
    discounted_returns,
    discounted_sums,
    forward_sums,
    scan_reference,
)


@pytest.fixture(autouse=True, params=["torch", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the torch form, and the compiled form."""
    monkeypatch.setenv("SLURMRL_OPS", request.param)
    return str(request.param)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def loop(
    x: Tensor, lengths: list[int], factor: float, decay: Tensor | None, tail: Tensor | None
) -> Tensor:
    """Return y_t = x_t + factor decay_t y_{t+1}, computed step by step."""
    y = x.double().clone()
    begin = 0
    for s, length in enumerate(lengths):
        behind = 0.0 if tail is None else float(tail[s])
        for t in reversed(range(begin, begin + length)):
            share = factor * (1.0 if decay is None else float(decay[t]))
            behind = float(x[t]) + share * behind
            y[t] = behind
        begin += length
    return y


@given(
    st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=6),
    st.floats(0, 1, allow_subnormal=False),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32),
)
def test_discounted_sums_equal_a_loop(
    lengths: list[int], factor: float, decays: bool, tails: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), generator=generator).to(dtype)
    decay = torch.rand(sum(lengths), generator=generator).to(dtype) if decays else None
    if decay is not None:
        decay[::5] = 0.0
    tail = torch.randn(len(lengths), generator=generator).to(dtype) if tails else None
    found = discounted_sums(x, offsets(lengths), factor, decay, tail)
    wanted = loop(x, lengths, factor, decay, tail)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(found, scan_reference(x, offsets(lengths), factor, decay, tail))


def test_discounted_sum_ignores_values_after_a_zero_decay() -> None:
    x = torch.tensor([1.0, 2.0, float("inf")])
    decay = torch.tensor([1.0, 0.0, 1.0])
    found = discounted_sums(x, offsets([3]), 1.0, decay, torch.tensor([float("nan")]))
    assert found[:2].tolist() == [3.0, 2.0]


def test_forward_sums_equal_a_loop() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    decay = torch.tensor([0.5, 0.25, 7.0, 9.0], dtype=torch.float64)
    assert forward_sums(x, offsets([3, 0, 1]), 1.0, decay).tolist() == [1.0, 2.5, 4.625, 8.0]


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("tails", [False, True])
def test_gradients_of_sums_pass_gradcheck(decays: bool, tails: bool) -> None:
    lengths = [3, 0, 1, 4]
    generator = torch.Generator().manual_seed(2)

    def draw(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64).requires_grad_()

    x, decay, tail = draw(8), draw(8) if decays else None, draw(4) if tails else None
    inputs = [one for one in (x, decay, tail) if one is not None]

    def sums(*given: Tensor) -> Tensor:
        rest = list(given[1:])
        return discounted_sums(
            given[0],
            offsets(lengths),
            0.9,
            rest.pop(0) if decays else None,
            rest.pop(0) if tails else None,
        )

    assert torch.autograd.gradcheck(sums, inputs)


def test_discounted_sums_pass_opcheck() -> None:
    x = torch.randn(8, requires_grad=True)
    decay, tail = torch.rand(8, requires_grad=True), torch.rand(4, requires_grad=True)
    cu_seqlens = offsets([3, 0, 1, 4])
    for case in ((x, cu_seqlens, None, None, 0.9), (x, cu_seqlens, decay, tail, 0.9)):
        torch.library.opcheck(torch.ops.slurmrl.scan.default, case)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": torch.zeros(2)}, r"decay must have shape \[3\], not \[2\]"),
        ({"tail": torch.zeros(2)}, r"tail must have shape \[1\], not \[2\]"),
        ({"tail": torch.zeros(1).double()}, "tail must be float32, not float64"),
        ({"factor": -0.1}, "factor must be between 0 and 1, not -0.1"),
    ],
)
def test_error_of_sums_names_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discounted_sums(
            **{"x": torch.zeros(3), "cu_seqlens": offsets([3]), "factor": 0.9, **arguments}
        )


def test_discounted_returns_equal_their_definition() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    assert discounted_returns(rewards, offsets([3, 1]), 0.5).tolist() == [1.5, 1.0, 2.0, 5.0]


STEPS = torch.zeros(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3).int(), offsets([3]), 0.9), "rewards must be float32 or"),
        ((STEPS, offsets([3]), 1.9), "gamma must be between 0 and 1"),
        ((STEPS, offsets([2]), 0.9), "cu_seqlens must run from 0 to 3, not from 0 to 2"),
    ],
)
def test_error_of_returns_names_the_argument(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discounted_returns(*arguments)


def test_half_precision_inputs_are_summed_in_float32() -> None:
    """Each step, 1 + 2^-7, is exact in bfloat16, but the sum of 300 of them is not."""
    steps = 300
    one = torch.full((steps,), 1 + 2**-7, dtype=torch.bfloat16)
    wanted = one.float().flip(0).cumsum(0).flip(0)
    assert torch.equal(discounted_returns(one, offsets([steps]), 1.0), wanted)
