"""Paged attention and the check of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.errors import EnvironmentFailure
from slurmrl.tensors.ops import paged_kernels
from slurmrl.tensors.ops.paged_kernels import (
    Sizes,
    example,
    paged_attention,
    reference,
    write_cells,
)
from tests.support.paged_cases import PAGE, case, exact

SIZES = Sizes(torch.device("cpu"), torch.bfloat16, 4, 2, 8, 16)
BOUNDS: dict[str, Any] = {"page": 16, "longest": 200, "scale": 0.3, "window": None}


def right(*inputs: Tensor, chunk: int, **options: Any) -> Tensor:
    exact = [x.float() if x.is_floating_point() else x for x in inputs]
    return reference(*exact, **options).to(inputs[0].dtype)


def wrong_in_chunks(*inputs: Tensor, chunk: int, **options: Any) -> Tensor:
    out = right(*inputs, chunk=chunk, **options)
    if chunk > 1:
        out[-1] += 0.1
    return out


def not_a_number(*inputs: Tensor, **options: Any) -> Tensor:
    return torch.full_like(inputs[0], torch.nan)


def out_of_memory(*inputs: Tensor, **options: Any) -> Tensor:
    raise RuntimeError("out of resource: shared memory, Required: 300000")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paged_kernels, "supported", lambda like: like.dtype == torch.bfloat16)
    for function in (paged_kernels._attention_failure, paged_kernels._write_failure):
        function.cache_clear()
    yield
    for function in (paged_kernels._attention_failure, paged_kernels._write_failure):
        function.cache_clear()


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (
            wrong_in_chunks,
            "chunks of 7 and a window of None its results differ from torch's by 0.1",
        ),
        (not_a_number, "differ from torch's by nan"),
        (out_of_memory, "RuntimeError: out of resource: shared memory, Required: 300000"),
    ],
)
def test_wrong_or_failing_attention_kernel_is_not_used(
    kernel: Callable[..., Tensor],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """slurmrl warns once and uses torch. With SLURMRL_OPS=native, this is an error."""
    monkeypatch.setattr(paged_kernels, "attend", kernel)
    inputs = example(SIZES, 200, 3)
    for _ in range(2):
        found = paged_attention(*inputs, **BOUNDS, chunk=3)
        assert torch.equal(found, reference(*inputs, *BOUNDS.values()))
        assert not paged_kernels.attends(inputs[1], 4, 16)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Attention over pages copies the key-value cache, which is slower")
    assert "4 query and 2 key heads of 8" in message
    monkeypatch.setenv("SLURMRL_OPS", "native")
    with pytest.raises(EnvironmentFailure, match=reason):
        paged_attention(*inputs, **BOUNDS)


def test_correct_attention_kernel_is_checked_once_per_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def counted(*inputs: Tensor, **options: Any) -> Tensor:
        calls.append(inputs[0].shape[1])
        return right(*inputs, **options)

    monkeypatch.setattr(paged_kernels, "attend", counted)
    inputs, tried = example(SIZES, 200, 3), 6
    for _ in range(3):
        paged_attention(*inputs, **BOUNDS)
    assert paged_kernels.attends(inputs[1], 4, 16)
    assert len(calls) == tried + 3
    assert paged_kernels.attends(inputs[1], 8, 16)
    assert calls[tried + 3 :] == [8] * tried
    monkeypatch.setenv("SLURMRL_OPS", "torch")
    paged_attention(*inputs, **BOUNDS)
    assert not paged_kernels.attends(inputs[1], 4, 16)
    assert len(calls) == 2 * tried + 3
    assert not caplog.records


@pytest.mark.parametrize("failing", [False, True])
def test_cache_write_kernel_is_checked_too(
    failing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        calls.append(len(slots))
        keys.index_copy_(0, slots, k)
        if not failing:
            values.index_copy_(0, slots, v)

    monkeypatch.setattr(paged_kernels, "write", write)
    k, v, slots = torch.ones(2, 2, 8).bfloat16(), torch.ones(2, 2, 8).bfloat16() * 2, [3, 1]
    keys, values = torch.zeros(2, 5, 2, 8).bfloat16()
    for _ in range(2):
        write_cells(keys, values, torch.tensor(slots), k, v)
    assert torch.equal(keys[slots], k)
    assert torch.equal(values[slots], v)
    assert calls == ([5] if failing else [5, 2, 2])
    assert len(caplog.records) == failing


LENGTHS = (40, 1, 17, 16, 15, 33, 2, 64, 5)
ROWS = (0, 1, 2, 2, 3, 4, 5, 6, 3)
OPTIONS: dict[str, Any] = {"page": PAGE, "longest": 64, "scale": 0.3, "window": None}


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("size", [6, 16, 20, 64, 70])
def test_each_token_attends_to_its_own_cells(size: int, window: int | None) -> None:
    inputs = case(LENGTHS, ROWS, 4, 2, size, unread=1e4)
    wanted = exact(inputs, 0.3, window)
    found = paged_attention(*inputs, **{**OPTIONS, "window": window})
    assert (found - wanted).abs().max() < 2e-6
    gathered = reference(*inputs, PAGE, 64, 0.3, window)
    assert (gathered - wanted).abs().max() < 2e-6


def test_large_scores_do_not_overflow() -> None:
    q, keys, *others = case(LENGTHS, ROWS, 4, 2, 16)
    inputs = (q * 100, keys * 100, *others)
    found = paged_attention(*inputs, **{**OPTIONS, "scale": 1.0})
    assert (found - exact(inputs, 1.0, None)).abs().max() < 1e-4


def test_token_output_does_not_depend_on_other_tokens() -> None:
    """In the compiled form, outputs have the same bits for any other tokens in the call."""
    q, keys, values, tables, rows, lengths = case(LENGTHS, ROWS, 4, 2, 20)
    together = paged_attention(q, keys, values, tables, rows, lengths, **OPTIONS)
    for t in range(len(q)):
        part = slice(t, t + 1)
        alone = paged_attention(q[part], keys, values, tables, rows[part], lengths[part], **OPTIONS)
        assert torch.equal(alone, together[part])
