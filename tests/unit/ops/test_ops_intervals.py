"""Gather, scatter and moving average over intervals, compiled and in torch, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.tensors.ops.intervals import Intervals, gather, scatter

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
ALL = [*FLOATS, torch.int8, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.complex128]


@pytest.fixture(autouse=True, params=["torch", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the torch form, and the compiled form."""
    monkeypatch.setenv("SLURMRL_OPS", request.param)
    return str(request.param)


@st.composite
def separate(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return disjoint intervals in random order, some of them adjacent or empty."""
    pairs, begin = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=12)
    ):
        pairs.append((begin + gap, begin + gap + length))
        begin += gap + length
    return draw(st.permutations(pairs))


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(count, generator=generator, dtype=torch.float64) * 50
    return (wide > 0) if dtype == torch.bool else wide.abs().to(dtype)


def size_of(pairs: list[tuple[int, int]]) -> int:
    return max((end for _, end in pairs), default=0) + 3


@given(separate(), st.sampled_from(ALL))
def test_scatter_restores_gathered_elements(
    pairs: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    source = numbers(size_of(pairs), dtype)
    intervals = Intervals.of(pairs)
    packed = gather(source, intervals)
    wanted = [source[begin:end] for begin, end in pairs]
    assert torch.equal(packed, torch.cat([source[:0], *wanted]))
    target = torch.zeros_like(source)
    scatter(target, intervals, packed)
    for begin, end in pairs:
        assert torch.equal(target[begin:end], source[begin:end])
    outside = torch.ones(len(source), dtype=torch.bool)
    for begin, end in pairs:
        outside[begin:end] = False
    assert not target[outside].any()


@given(
    separate(),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.floats(0, 1, allow_subnormal=False),
)
def test_moving_average_converts_dtypes(
    pairs: list[tuple[int, int]], one: torch.dtype, other: torch.dtype, eta: float
) -> None:
    intervals = Intervals.of(pairs)
    packed, target = numbers(intervals.total, one), numbers(size_of(pairs), other, seed=1)
    before = target.clone()
    scatter(target, intervals, packed, eta)
    wide = torch.float64 if torch.float64 in (one, other) else torch.float32
    wanted, at = before.clone(), 0
    for begin, end in pairs:
        new = packed[at : at + end - begin].to(wide)
        mixed = new if eta == 1 else eta * new + (1 - eta) * before[begin:end].to(wide)
        wanted[begin:end] = mixed.to(other)
        at += end - begin
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_conversions_round_like_torch(source: torch.dtype, target: torch.dtype) -> None:
    """Covers all 16-bit patterns and the midpoints between them: ties, subnormals, infinities."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = torch.cat([bits.view(torch.float16).float(), bits.view(torch.bfloat16).float()])
    between = torch.cat([every.nextafter(torch.tensor(x)) for x in (float("inf"), -float("inf"))])
    halfway = (every[1:] + every[:-1]) / 2
    x = torch.cat([every, between, halfway]).to(source)
    whole = Intervals.of([(0, len(x))])
    found, wanted = gather(x, whole, dtype=target), x.to(target)
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    assert bool(same.all()), x[~same][:5]
    assert torch.equal(found.signbit() & ~found.isnan(), wanted.signbit() & ~wanted.isnan())


def test_touching_intervals_are_merged() -> None:
    intervals = Intervals.of([(4, 6), (6, 6), (6, 9), (0, 2), (2, 4)])
    assert intervals.starts.tolist() == [4, 0]
    assert intervals.offsets.tolist() == [0, 5, 9]
    assert (intervals.total, intervals.stop, intervals.disjoint) == (9, 9, True)
    assert not Intervals.of([(0, 3), (2, 4)]).disjoint


def test_offsets_may_exceed_32_bits() -> None:
    far = 2**32
    intervals = Intervals.of([(far, far + 7), (3, 5)])
    assert intervals.starts.tolist() == [far, 3]
    # Sparse memory: only the pages that are touched exist.
    flat = torch.empty(far + 8, dtype=torch.uint8)
    flat[far : far + 7] = torch.arange(7, dtype=torch.uint8)
    flat[3:5] = 9
    assert gather(flat, intervals).tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 9]


def test_one_long_interval_is_divided_among_threads() -> None:
    source = numbers(300_000, torch.float32)
    intervals = Intervals.of([(1, 290_000), (290_003, 290_004)])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        packed = gather(source, intervals, dtype=torch.bfloat16)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(packed, torch.cat([source[1:290_000], source[290_003:290_004]]).bfloat16())


def test_gradient_of_gather_adds_up_where_intervals_overlap() -> None:
    source = torch.randn(6, dtype=torch.float64, requires_grad=True)
    intervals = Intervals.of([(1, 4), (3, 5)])
    assert torch.autograd.gradcheck(lambda x: gather(x, intervals), (source,))
    gather(source, intervals).sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [0, 1, 1, 2, 1, 0]


def test_interval_operators_pass_opcheck() -> None:
    intervals = Intervals.of([(1, 4), (5, 6)])
    source = torch.randn(8, requires_grad=True)
    where = (intervals.starts, intervals.offsets)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (source, *where, intervals.total, dtype)
        torch.library.opcheck(torch.ops.slurmrl.gather_intervals.default, arguments)
    for eta in (1.0, 0.25):
        mixed = (torch.zeros(8), torch.ones(4, dtype=torch.bfloat16), *where, eta)
        torch.library.opcheck(torch.ops.slurmrl.scatter_intervals.default, mixed)


def test_interval_operators_compile_without_graph_breaks() -> None:
    intervals = Intervals.of([(1, 4), (5, 6)])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def swap(source: Tensor, target: Tensor) -> Tensor:
        scatter(target, intervals, gather(source, intervals), 0.5)
        return target

    found = swap(torch.ones(8), torch.zeros(8))
    assert found.tolist() == [0, 0.5, 0.5, 0.5, 0, 0.5, 0, 0]


INTERVALS = Intervals.of([(1, 3)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": torch.zeros(2)}, "intervals end at element 3, but target has 2 elements"),
        ({"target": torch.zeros(4, 2)[:, 0]}, "target must be 1-D and contiguous"),
        ({"target": torch.zeros(4, device="meta")}, "intervals are on cpu, but target on meta"),
        ({"packed": torch.zeros(3)}, r"packed must have shape \[2\], not \[3\]"),
        (
            {"packed": torch.zeros(2, dtype=torch.int32)},
            "packed is torch.int32 and target torch.fl",
        ),
        ({"eta": 1.1}, "eta must be between 0 and 1, not 1.1"),
        (
            {"target": torch.zeros(4).int(), "packed": torch.zeros(2).int(), "eta": 0.5},
            "eta must be 1 for a target of torch.int32",
        ),
        ({"intervals": Intervals.of([(0, 1), (0, 1)])}, "intervals must not overlap"),
        ({"packed": torch.zeros(2, requires_grad=True)}, "scatter has no gradient"),
    ],
)
def test_interval_error_names_the_argument(changes: dict[str, Any], message: str) -> None:
    good = {"target": torch.zeros(4), "intervals": INTERVALS, "packed": torch.zeros(2)}
    with pytest.raises(UsageError, match=message):
        scatter(**{**good, **changes})


def test_packed_tensor_must_not_overlap_the_target() -> None:
    target = torch.zeros(8)
    with pytest.raises(UsageError, match="packed must not share memory with target"):
        scatter(target, INTERVALS, target[4:6])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 1), (3, 2)], r"pair 1 is \(3, 2\)"),
        ([(-1, 2)], r"pair 0 is \(-1, 2\)"),
        (torch.zeros(3, dtype=torch.int64), r"must be pairs, not of shape \[3\]"),
        ([(0, 1), (2,)], "intervals must be pairs of integers"),
        ([(0.5, 1.5)], "intervals must be int32 or int64, not torch.float32"),
    ],
)
def test_invalid_intervals_are_rejected(pairs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Intervals.of(pairs)
