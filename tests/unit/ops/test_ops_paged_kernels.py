"""The kernels for key-value caches in pages, run by Triton's interpreter, equal float64 references.

Compiled and on a GPU they are tested by tests/null_gpu and tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slurmrl.models import inference
from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.rollouts.generation.native import decode as decode_module
from slurmrl.rollouts.generation.native import model_runner as runner_module
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.tensors.ops import paged_kernels
from slurmrl.tensors.ops.paged_kernels import paged_attention, write_cells
from tests.support.generated import GenerationOutput, generate
from tests.support.paged_cases import PAGE, case, exact
from tests.support.recorded_graphs import RecordedGraphs
from tests.unit.models.conftest import BASE, ODD, random_decoder

with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")  # Triton's own functions read it on import
    pytest.importorskip("triton", reason="CPU builds of torch come without Triton")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Absolute; results are about 1."""
MANY_PROCESSORS = 1000
"""Rows are split as far as they can be."""


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Run the kernels in Triton's interpreter. The tokens and the splits of each call."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SLURMRL_OPS", "native")
    calls: list[tuple[int, int]] = []
    splits_of = paged_kernels._splits

    def recorded(programs: int, longest: int, device: torch.device) -> int:
        calls.append((programs, splits_of(programs, longest, device)))
        return calls[-1][1]

    monkeypatch.setattr(paged_kernels, "_splits", recorded)
    return calls


LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 130, 300, 1)
"""Those of single tokens; the last one is of a row that pads the call."""
CHUNKS = ((5, 3), (60, 9), (296, 5), (16, 1), (0, 1))
"""First lengths and numbers of adjacent tokens."""


@pytest.mark.parametrize(
    ("processors", "window"), [(MANY_PROCESSORS, None), (1, None), (MANY_PROCESSORS, 40), (1, 1)]
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [
        (3, 3, 64, torch.float32),
        (6, 2, 20, torch.bfloat16),
        (20, 1, 96, torch.float16),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_paged_attention_equals_float64(
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    window: int | None,
    processors: int,
    chunked: bool,
    launched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers single tokens of many rows together with chunks of prompts."""
    lengths, rows = list(LENGTHS), list(range(len(LENGTHS)))
    for first, count in CHUNKS if chunked else ():
        rows += [max(rows) + 1] * count
        lengths += range(first, first + count)
    inputs = tuple(
        x.to(dtype) if x.is_floating_point() else x
        for x in case(lengths, rows, heads, kv_heads, size)
    )
    paged_kernels.attends(torch.empty(0, kv_heads, size, dtype=dtype), heads, PAGE)
    monkeypatch.setattr(paged_kernels, "_multiprocessors", lambda device: processors)
    launched.clear()
    options: dict[str, Any] = {"page": PAGE, "longest": 300, "scale": 0.3, "window": window}
    found = paged_attention(*inputs, **options, chunk=9 if chunked else 1)
    assert found.dtype == dtype
    assert (found.double() - exact(inputs, 0.3, window)).abs().max() <= TOLERANCE[dtype]
    ((_, splits),) = launched
    assert splits == 2 if processors == MANY_PROCESSORS and window is None else splits <= 2


@pytest.mark.parametrize("processors", [MANY_PROCESSORS, 1])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_sinks_count_once(
    window: int | None, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers split rows."""
    monkeypatch.setattr(paged_kernels, "_multiprocessors", lambda device: processors)
    inputs = case((*LENGTHS[1:], 60, 61), (*range(len(LENGTHS) - 1), 8, 8), 6, 2, 20)
    sinks = torch.linspace(-3, 30, 6)
    options: dict[str, Any] = {"page": PAGE, "longest": 300, "scale": 0.3, "window": window}
    found = paged_attention(*inputs, **options, chunk=2, sinks=sinks)
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    wide = tuple(x.nan_to_num() if x.is_floating_point() else x for x in wide)
    wanted = paged_kernels.reference(*wide, PAGE, 300, 0.3, window, sinks.double())
    assert (found - wanted).abs().max() < 1e-5


def test_queries_may_be_slices_and_scores_may_be_large() -> None:
    q, *others = case((40, 200), (0, 1), 4, 2, 32)
    wider = torch.cat((q, torch.full_like(q, torch.nan)), 1)[:, :4]
    assert not wider.is_contiguous()
    options: dict[str, Any] = {"page": PAGE, "longest": 200, "scale": 40.0, "window": None}
    found = paged_attention(wider, *others, **options)
    assert (found - exact((q, *others), 40.0, None)).abs().max() < 1e-4
    none = paged_attention(q[:0], *others[:3], *(x[:0] for x in others[3:]), **options)
    assert none.shape == (0, 4, 32)


def test_one_long_row_may_be_split_many_times(
    launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also covers parts without cells, if the bound of a graph is not reached."""
    inputs = case((1500, 3), (0, 1), 2, 1, 16)
    options: dict[str, Any] = {"page": PAGE, "longest": 8192, "scale": 0.3, "window": None}
    paged_attention(*inputs, **options)
    monkeypatch.setattr(paged_kernels, "_multiprocessors", lambda device: MANY_PROCESSORS)
    found = paged_attention(*inputs, **options)
    assert launched[-1][1] == paged_kernels.MOST_SPLITS
    assert (found - exact(inputs, 0.3, None)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cache_writes_equal_torch(dtype: torch.dtype) -> None:
    """Parts of a wider tensor are written to the right places, and no other cell changes."""
    wider = torch.randn(5, 7, 1000).to(dtype)
    k, v = wider[:, 2:4], wider[:, 4:6]
    slots = torch.tensor([3, 0, 7, 8, 5])
    slabs, wanted = torch.zeros(2, 9, 2, 1000, dtype=dtype), torch.zeros(2, 9, 2, 1000, dtype=dtype)
    write_cells(*slabs, slots, k, v)
    for slab, x in zip(wanted, (k, v), strict=True):
        slab.index_copy_(0, slots, x)
    assert torch.equal(slabs, wanted)


def generated(name: str, options: GenerationOptions, limits: Limits) -> GenerationOutput:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 14, 1])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    ids = torch.randint(4, 37, (int(lengths.sum()),), generator=draw)
    decoder = random_decoder(ModelConfig.from_hf({**BASE, **ODD[name]}), 0)
    keys = torch.arange(6)
    return generate(decoder, ids, ends, options, seed=1, step=2, keys=keys, limits=limits)


@pytest.mark.parametrize(("name", "graphs"), [("qwen3", True), ("qwen2-windows", False)])
def test_completions_equal_torch(
    name: str, graphs: bool, launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers chunked prompts, shared prompts, and decoding in graphs of fixed shapes."""
    options = GenerationOptions(max_new_tokens=8, temperature=0.8, stop_token_ids=(3,))
    limits = Limits(rows=8, step_tokens=12, page_tokens=4)
    found: list[GenerationOutput] = []
    # A GPU has no compiled operators for a whole layer, or for its heads.
    monkeypatch.setattr(inference, "_whole", lambda layer: None)
    monkeypatch.setattr("slurmrl.tensors.ops.paged_kernels.for_floats", lambda like: None)
    for choice, make in (("torch", False), ("native", graphs)):
        recorded = RecordedGraphs() if make else None
        monkeypatch.setattr(runner_module, "capture_for", lambda decoder, made=recorded: made)
        monkeypatch.setattr(decode_module, "LEAST_CELLS", 32)
        monkeypatch.setenv("SLURMRL_OPS", choice)
        launched.clear()
        found.append(generated(name, options, limits))
        assert bool(launched) == (choice == "native")
        assert recorded is None or recorded.replayed > recorded.captured > 0
    wanted, own = found
    assert torch.equal(own.tokens, wanted.tokens)
    assert (own.logprobs - wanted.logprobs).abs().max() < 1e-5
