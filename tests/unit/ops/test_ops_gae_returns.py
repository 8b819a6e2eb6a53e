"""Sums, returns, V-trace and padded rows, compiled and in torch, against float64 loops."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.ops.gae import packed_gae
from slurmrl.ops.returns import (
    discounted_returns,
    lambda_returns,
    padded_gae,
    padded_gae_overlapping,
    vtrace,
)
from slurmrl.ops.scan import discounted_sums, forward_sums, reference


@pytest.fixture(autouse=True, params=["torch", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The pure torch form and the compiled form."""
    monkeypatch.setenv("SLURMRL_OPS", request.param)
    return str(request.param)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def loop(
    x: Tensor, lengths: list[int], factor: float, decay: Tensor | None, tail: Tensor | None
) -> Tensor:
    """y_t = x_t + factor decay_t y_{t+1}, step by step."""
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


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.integers(0, 2), st.integers(0, 70)), max_size=6),
    st.floats(0, 1, allow_subnormal=False),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**32),
)
def test_sums_are_the_loop(
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
    assert torch.equal(found, reference(x, offsets(lengths), factor, decay, tail))


def test_a_zero_hides_what_is_behind() -> None:
    x = torch.tensor([1.0, 2.0, float("inf")])
    decay = torch.tensor([1.0, 0.0, 1.0])
    found = discounted_sums(x, offsets([3]), 1.0, decay, torch.tensor([float("nan")]))
    assert found[:2].tolist() == [3.0, 2.0]


def test_forward_sums() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    decay = torch.tensor([0.5, 0.25, 7.0, 9.0], dtype=torch.float64)
    assert forward_sums(x, offsets([3, 0, 1]), 1.0, decay).tolist() == [1.0, 2.5, 4.625, 8.0]


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("tails", [False, True])
def test_gradients_of_sums(decays: bool, tails: bool) -> None:
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


def test_opcheck_of_sums() -> None:
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
def test_an_error_names_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discounted_sums(
            **{"x": torch.zeros(3), "cu_seqlens": offsets([3]), "factor": 0.9, **arguments}
        )


def test_discounted_returns() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    assert discounted_returns(rewards, offsets([3, 1]), 0.5).tolist() == [1.5, 1.0, 2.0, 5.0]
    ends = torch.tensor([4.0, 2.0])
    assert discounted_returns(rewards, offsets([3, 1]), 0.5, ends).tolist() == [2.0, 2.0, 4.0, 6.0]


def test_lambda_returns_are_the_recursion() -> None:
    lengths, gamma, lam = [4, 1, 0, 6], 0.9, 0.7
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(11, generator=generator, dtype=torch.float64)
    values = torch.randn(15, generator=generator, dtype=torch.float64)
    truncated = torch.tensor([True, False, True, False])
    found = lambda_returns(rewards, values, offsets(lengths), truncated, gamma, lam)
    begin = 0
    for s, length in enumerate(lengths):
        behind = float(values[begin + s + length]) if truncated[s] else 0.0
        value = behind
        for t in reversed(range(begin, begin + length)):
            behind = float(rewards[t]) + gamma * ((1 - lam) * value + lam * behind)
            value = float(values[t + s])
            assert float(found[t]) == pytest.approx(behind)
        begin += length


def test_vtrace_is_its_definition() -> None:
    """v_t = V_t + sum_i gamma^i (prod of c) rho delta, as in the paper, term by term."""
    lengths, gamma = [4, 1, 0, 6], 0.9
    generator = torch.Generator().manual_seed(4)
    log_ratios, rewards, values = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    ends = torch.randn(4, generator=generator, dtype=torch.float64)
    targets, advantages = vtrace(
        log_ratios, rewards, values, offsets(lengths), ends, gamma, rho_clip=1.2, c_clip=0.9
    )
    rho, c = log_ratios.exp().clamp(max=1.2), log_ratios.exp().clamp(max=0.9)
    begin = 0
    for s, length in enumerate(lengths):
        stop = begin + length
        following = [*values[begin + 1 : stop].tolist(), float(ends[s])]
        for t in range(begin, stop):
            total, product = float(values[t]), 1.0
            for i in range(t, stop):
                delta = float(rho[i]) * (
                    float(rewards[i]) + gamma * following[i - begin] - float(values[i])
                )
                total += gamma ** (i - t) * product * delta
                product *= float(c[i])
            assert float(targets[t]) == pytest.approx(total)
        for t in range(begin, stop):
            behind = float(targets[t + 1]) if t + 1 < stop else float(ends[s])
            wanted = float(rho[t]) * (float(rewards[t]) + gamma * behind - float(values[t]))
            assert float(advantages[t]) == pytest.approx(wanted)
        begin = stop


def test_vtrace_on_policy_is_gae_with_lambda_one() -> None:
    generator = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    ends = torch.tensor([0.5, 0.0], dtype=torch.float64)
    cu_seqlens, cut = offsets([3, 4]), torch.tensor([True, False])
    targets, _ = vtrace(torch.zeros_like(rewards), rewards, values, cu_seqlens, ends, 0.9)
    _, returns = packed_gae(rewards, values, cu_seqlens, cut, 0.9, 1.0, bootstrap_values=ends)
    torch.testing.assert_close(targets, returns)


def flags(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.rand(rows, columns, generator=generator) < 0.3


@pytest.mark.parametrize("overlapping", [False, True])
def test_padded_rows_are_the_loop_over_time(overlapping: bool) -> None:
    rows, steps, gamma, lam = 3, 9, 0.9, 0.8
    generator = torch.Generator().manual_seed(6)
    rewards = torch.randn(rows, steps, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, steps + 1, generator=generator, dtype=torch.float64)
    ends, cut = flags(generator, rows, steps + 1), flags(generator, rows, steps + 1)
    function = padded_gae_overlapping if overlapping else padded_gae
    advantages, returns = function(rewards, values, ends, cut, gamma, lam)
    for row in range(rows):
        carry = 0.0
        for t in reversed(range(steps)):
            goes_on, whole = float(~ends[row, t + 1]), float(~cut[row, t + 1])
            delta = rewards[row, t] + gamma * values[row, t + 1] * goes_on - values[row, t]
            if overlapping:
                carry = float(delta + gamma * lam * goes_on * carry) * whole
            else:
                carry = float(delta + gamma * lam * goes_on * whole * carry)
            assert float(advantages[row, t]) == pytest.approx(carry)
    torch.testing.assert_close(returns, advantages + values[:, :-1])


ROWS = {
    "rewards": torch.zeros(2, 3),
    "values": torch.zeros(2, 4),
    "truncated": torch.zeros(2, 4).bool(),
    "gamma": 0.9,
    "lam": 0.9,
}


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rewards", torch.zeros(3), r"rewards must have shape \[B, L\], not \[3\]"),
        ("rewards", torch.zeros(2, 3).int(), "rewards must be float32 or .*, not int32"),
        ("values", torch.zeros(2, 3), r"values must have shape \[2, 4\], not \[2, 3\]"),
        ("truncated", torch.zeros(2, 3).bool(), r"truncated must have shape \[2, 4\]"),
        ("truncated", torch.zeros(2, 4), "truncated must be bool, not float32"),
        ("flags", torch.zeros(1, 4).bool(), r"must have shape \[2, 4\], not \[1, 4\]"),
        ("lam", 1.5, "lam must be between 0 and 1"),
    ],
)
def test_padded_rows_that_do_not_fit(
    overlapping: bool, name: str, value: Any, message: str
) -> None:
    function = padded_gae_overlapping if overlapping else padded_gae
    flags = "dones" if overlapping else "on_reset"
    arguments = {**ROWS, flags: torch.zeros(2, 4).bool()}
    with pytest.raises(UsageError, match=message):
        function(**{**arguments, flags if name == "flags" else name: value})


STEPS = torch.zeros(3)
VTRACE = {
    "log_ratios": STEPS,
    "rewards": STEPS,
    "values": STEPS,
    "cu_seqlens": offsets([3]),
    "bootstrap_values": torch.zeros(1),
    "gamma": 0.9,
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_ratios", torch.zeros(3).long(), "log_ratios must be float32 or"),
        ("rewards", torch.zeros(1), r"rewards must have shape \[3\], not \[1\]"),
        ("values", torch.zeros(4), r"values must have shape \[3\], not \[4\]"),
        ("cu_seqlens", offsets([2]), "cu_seqlens must run from 0 to 3, not from 0 to 2"),
        ("bootstrap_values", torch.zeros(2), r"bootstrap_values must have shape \[1\]"),
        ("gamma", -1.0, "gamma must be between 0 and 1"),
    ],
)
def test_an_error_of_vtrace_names_the_argument(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vtrace(**{**VTRACE, name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3).int(), offsets([3]), 0.9), "rewards must be float32 or"),
        ((STEPS, offsets([3]), 1.9), "gamma must be between 0 and 1"),
        ((STEPS, offsets([3]), 0.9, torch.zeros(2)), r"bootstrap_values must have shape \[1\]"),
    ],
)
def test_an_error_of_returns_names_the_argument(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        discounted_returns(*arguments)


def test_inputs_of_16_bits_are_summed_in_32() -> None:
    """bfloat16 inputs are summed in float32: each step, 1 + 2^-7, is exact in bfloat16, but the sum
    of 300 of them is not."""
    steps = 300
    one = torch.full((1, steps), 1 + 2**-7, dtype=torch.bfloat16)
    wanted = one.float().flatten().flip(0).cumsum(0).flip(0)
    zeros, off = torch.zeros(1, steps + 1, dtype=torch.bfloat16), torch.zeros(1, steps + 1).bool()
    for function in (padded_gae, padded_gae_overlapping):
        assert torch.equal(function(one, zeros, off, off, 1.0, 1.0)[1].flatten(), wanted)
    flat, ends = one.flatten(), torch.zeros(1, dtype=torch.bfloat16)
    targets, _ = vtrace(0 * flat, flat, 0 * flat, offsets([steps]), ends, 1.0)
    assert torch.equal(targets, wanted)
    assert torch.equal(discounted_returns(flat, offsets([steps]), 1.0, ends), wanted)
