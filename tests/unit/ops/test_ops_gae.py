"""Packed GAE, compiled and in torch, against a loop over the definition in float64."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.errors import UsageError
from slurmrl.tensors.ops.arguments import check_vector
from slurmrl.tensors.ops.scan import gae_reference, packed_gae

Sequences = list[tuple[list[float], list[float], bool]]
"""(rewards, values including the final state's, truncated) of each sequence."""

DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""The tolerance of each input dtype against float64 on the same inputs."""


@pytest.fixture(autouse=True, params=["torch", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the torch form, and the compiled form."""
    monkeypatch.setenv("SLURMRL_OPS", request.param)
    return str(request.param)


def by_definition(
    rewards: list[float], values: list[float], truncated: bool, gamma: float, lam: float
) -> list[float]:
    """sum_i (gamma lam)^i (r_{t+i} + gamma V_{t+i+1} - V_{t+i}), term by term."""
    n = len(rewards)
    following = [*values[1:n], values[n] if truncated else 0.0]
    advantages = []
    for t in range(n):
        total = 0.0
        for i in range(n - t):
            delta = rewards[t + i] + gamma * following[t + i] - values[t + i]
            total += (gamma * lam) ** i * delta
        advantages.append(total)
    return advantages


def pack(
    sequences: Sequences, dtype: torch.dtype, offsets: torch.dtype = torch.int32
) -> tuple[torch.Tensor, ...]:
    return (
        torch.tensor([x for rewards, _, _ in sequences for x in rewards], dtype=dtype),
        torch.tensor([x for _, values, _ in sequences for x in values], dtype=dtype),
        torch.tensor([0, *accumulate(len(r) for r, _, _ in sequences)], dtype=offsets),
        torch.tensor([truncated for _, _, truncated in sequences], dtype=torch.bool),
    )


def rounded(sequences: Sequences, dtype: torch.dtype) -> Sequences:
    """Return the numbers rounded to the dtype."""

    def through(numbers: list[float]) -> list[float]:
        return torch.tensor(numbers, dtype=dtype).double().tolist()

    return [(through(r), through(v), truncated) for r, v, truncated in sequences]


numbers = st.floats(-3, 3, allow_subnormal=False)
shares = st.floats(0, 1, allow_subnormal=False)
lengths = st.one_of(st.integers(0, 2), st.integers(0, 40))


@st.composite
def sequence(draw: st.DrawFn) -> tuple[list[float], list[float], bool]:
    n = draw(lengths)
    rewards = draw(st.lists(numbers, min_size=n, max_size=n))
    values = draw(st.lists(numbers, min_size=n + 1, max_size=n + 1))
    return rewards, values, draw(st.booleans())


@given(
    st.lists(sequence(), max_size=6),
    shares,
    shares,
    st.sampled_from(sorted(DTYPES, key=str)),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_gae_equals_its_definition(
    sequences: Sequences, gamma: float, lam: float, dtype: torch.dtype, offsets: torch.dtype
) -> None:
    sequences = rounded(sequences, dtype)
    packed = pack(sequences, dtype, offsets)
    advantages, returns = packed_gae(*packed, gamma, lam)
    wanted = [a for r, v, b in sequences for a in by_definition(r, v, b, gamma, lam)]
    before = [value for rewards, values, _ in sequences for value in values[: len(rewards)]]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert advantages.dtype == returns.dtype == wide
    tolerance = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(
        advantages.double(), torch.tensor(wanted, dtype=torch.float64), **tolerance
    )
    torch.testing.assert_close(
        returns, advantages + torch.tensor(before, dtype=wide), rtol=0, atol=0
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip((advantages, returns), gae_reference(*packed, gamma, lam), strict=True)
    )


@given(st.lists(sequence(), max_size=6), shares, shares)
def test_gae_accepts_values_aligned_with_the_steps(
    sequences: Sequences, gamma: float, lam: float
) -> None:
    rewards, values, cu_seqlens, truncated = pack(sequences, torch.float64)
    inner = [x for rewards, values, _ in sequences for x in values[: len(rewards)]]
    ends = [values[-1] for _, values, _ in sequences]
    found = packed_gae(
        rewards,
        torch.tensor(inner, dtype=torch.float64),
        cu_seqlens,
        truncated,
        gamma,
        lam,
        bootstrap_values=torch.tensor(ends, dtype=torch.float64),
    )
    wanted = packed_gae(rewards, values, cu_seqlens, truncated, gamma, lam)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gae_of_long_sequences_is_accurate_in_float32() -> None:
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
    for rewards, values, truncated in sequences:
        following, carry, part = [*values[1:-1], values[-1] if truncated else 0.0], 0.0, []
        for t in reversed(range(len(rewards))):
            carry = rewards[t] + 0.99 * following[t] - values[t] + 0.99 * 0.95 * carry
            part.append(carry)
        wanted += part[::-1]
    torch.testing.assert_close(
        advantages.double(), torch.tensor(wanted).double(), atol=1e-4, rtol=1e-4
    )


def many(sequences: int, longest: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, longest + 1, (sequences,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    steps = int(cu_seqlens[-1])
    return (
        torch.randn(steps, generator=generator),
        torch.randn(steps + sequences, generator=generator),
        cu_seqlens,
        torch.rand(sequences, generator=generator) < 0.5,
    )


@pytest.mark.parametrize(("sequences", "longest"), [(3, 90_000), (400, 700), (60_000, 3)])
def test_gae_is_identical_with_any_number_of_threads(sequences: int, longest: int) -> None:
    packed = many(sequences, longest)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(packed_gae(*packed, 0.99, 0.97))
    finally:
        torch.set_num_threads(threads)
    wanted = gae_reference(*packed, 0.99, 0.97)
    for result in results:
        assert torch.equal(result[0], wanted[0])
        assert torch.equal(result[1], wanted[1])


def test_nan_does_not_spread_to_other_sequences() -> None:
    nan = float("nan")
    sequences: Sequences = [([1.0], [0.5, nan], False), ([nan, 1.0], [0.0, 0.0, 0.0], True)]
    advantages, _ = packed_gae(*pack(sequences, torch.float32), 1.0, 1.0)
    assert advantages[0] == 0.5
    assert advantages[1].isnan()
    assert advantages[2] == 1.0


def test_strided_tensors_are_accepted() -> None:
    rewards, values, cu_seqlens, truncated = many(5, 50)
    wide = torch.stack([rewards, rewards], 1)[:, 0]
    assert not wide.is_contiguous()
    found = packed_gae(wide, values, cu_seqlens, truncated, 0.9, 0.8)
    wanted = packed_gae(rewards, values, cu_seqlens, truncated, 0.9, 0.8)
    assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("aligned", [False, True])
def test_gae_gradients_pass_gradcheck(aligned: bool) -> None:
    rewards, values, cu_seqlens, truncated = many(4, 5)
    rewards = rewards.double().requires_grad_()
    ends = None
    if aligned:
        values = values[: len(rewards)]
        ends = torch.randn(4, dtype=torch.float64, requires_grad=True)
    values = values.double().requires_grad_()

    def both(*inputs: Any) -> Any:
        return packed_gae(*inputs[:2], cu_seqlens, truncated, 0.9, 0.8, *inputs[2:])

    inputs = (rewards, values) if ends is None else (rewards, values, ends)
    assert torch.autograd.gradcheck(both, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aligned", [False, True])
def test_gae_passes_opcheck(dtype: torch.dtype, aligned: bool) -> None:
    rewards, values, cu_seqlens, truncated = many(4, 5)
    rewards, values = rewards.to(dtype).requires_grad_(), values.to(dtype).requires_grad_()
    ends = values.detach()[:4].clone() if aligned else None
    values = values.detach()[: len(rewards)].clone() if aligned else values
    packed = (rewards, values, cu_seqlens, truncated, ends, 0.9, 0.8)
    torch.library.opcheck(torch.ops.slurmrl.gae.default, packed)


def test_gae_compiles_without_graph_breaks() -> None:
    packed = many(4, 5)
    compiled = torch.compile(packed_gae, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(
        compiled(*packed, 0.9, 0.8), packed_gae(*packed, 0.9, 0.8), strict=True
    ):
        assert torch.equal(found, wanted)


GOOD = {
    "rewards": torch.zeros(3),
    "values": torch.zeros(5),
    "cu_seqlens": torch.tensor([0, 1, 3]),
    "truncated": torch.zeros(2, dtype=torch.bool),
    "gamma": 0.9,
    "lam": 0.9,
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rewards", torch.zeros(1, 3), r"rewards must be 1-D, not of shape \[1, 3\]"),
        ("rewards", torch.zeros(3, dtype=torch.int64), "rewards must be float32 or .* not int64"),
        ("values", torch.zeros(4), r"values must have shape \[5\], not \[4\]"),
        ("values", torch.zeros(5).double(), "values must be float32, not float64"),
        ("cu_seqlens", torch.tensor([0.0, 3.0]), "cu_seqlens must be int32 or int64, not float32"),
        ("cu_seqlens", torch.tensor([0, 1, 2]), "cu_seqlens must run from 0 to 3, not from 0 to 2"),
        ("cu_seqlens", torch.tensor([0, 4, 3]), "must not decrease: entry 1 is 4, entry 2 is 3"),
        ("cu_seqlens", torch.tensor([], dtype=torch.int32), r"cu_seqlens must have shape"),
        ("cu_seqlens", torch.tensor([0]), "cu_seqlens has no sequence, but there are 3 elements"),
        ("truncated", torch.zeros(3, dtype=torch.bool), r"truncated must have shape \[2\]"),
        ("truncated", torch.zeros(2), "truncated must be bool, not float32"),
        ("bootstrap_values", torch.zeros(2), r"values must have shape \[3\], not \[5\]"),
        ("gamma", 1.5, "gamma must be between 0 and 1, not 1.5"),
        ("lam", float("nan"), "lam must be between 0 and 1, not nan"),
    ],
)
def test_gae_error_names_the_argument(name: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        packed_gae(**{**GOOD, name: value})


def test_tensor_on_another_device_is_named() -> None:
    with pytest.raises(UsageError, match="values must be on cpu like the first argument, not meta"):
        check_vector(
            "values", torch.zeros(5, device="meta"), 5, (torch.float32,), torch.device("cpu")
        )
