"""Kernels for paged key-value caches on a real GPU, against float64 on the CPU, in CUDA graphs, and
in generation of whole batches.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.tensors.ops import paged_kernels
from slurmrl.tensors.ops.paged_kernels import (
    Sizes,
    example,
    paged_attention,
    reference,
    write_cells,
)
from tests.support.generated import generate
from tests.unit.models.conftest import BASE, ODD, random_decoder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)
DTYPES = pytest.mark.parametrize("dtype", paged_kernels.TOLERANCE)
SHAPES = pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(12, 2, 128), (7, 1, 64), (4, 4, 96), (8, 1, 256), (40, 2, 80)]
)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a kernel that cannot run, or is wrong, an error, instead of a fallback to torch."""
    monkeypatch.setenv("SLURMRL_OPS", "native")


def exact(inputs: tuple[Any, ...], longest: int, window: int | None) -> torch.Tensor:
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    settings: tuple[Any, ...] = (16, longest, 0.1, window)
    return reference(*wide, *settings)


@DTYPES
@SHAPES
@pytest.mark.parametrize(
    ("longest", "chunk", "window"),
    [
        (40, 1, None),
        (300, 1, 1),
        (9000, 1, None),
        (9000, 1, 1000),
        (300, 37, None),
        (300, 37, 1),
        (3000, 37, 1000),
        (3000, 37, None),
    ],
)
def test_paged_attention_equals_float64(
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    window: int | None,
    chunk: int,
    longest: int,
) -> None:
    inputs = example(
        Sizes(torch.device("cuda", 0), dtype, heads, kv_heads, size, 16), longest, chunk
    )
    there = tuple(x.cuda() for x in inputs)
    options: dict[str, Any] = {"page": 16, "scale": 0.1, "window": window, "chunk": chunk}
    found = paged_attention(*there, longest=longest, **options)
    wanted = exact(inputs, longest, window)
    assert (found.cpu().double() - wanted).abs().max() <= paged_kernels.TOLERANCE[dtype]
    again = paged_attention(*there, longest=longest, **options)
    assert torch.equal(found, again)


@DTYPES
def test_cuda_graphs_follow_new_lengths_and_tables(dtype: torch.dtype) -> None:
    """A replayed graph gives the right results for other lengths, rows and pages."""
    sizes, bound = Sizes(torch.device("cuda", 0), dtype, 12, 2, 128, 16), 4096
    first, other = example(sizes, bound, 1), example(sizes, bound, 1)
    other = (*other[:3], other[3].flip(0), other[4].flip(0), other[5] // 3 + 1)
    memory = tuple(x.cuda() for x in first)
    k, slots = memory[1][:4].clone(), torch.arange(4).cuda()

    def compute() -> torch.Tensor:
        write_cells(memory[1], memory[2], slots, k, k)
        return paged_attention(*memory, page=16, longest=bound, scale=0.1, window=None)

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for inputs in (first, other):
        for target, source in zip(memory, inputs, strict=True):
            target.copy_(source)
        graph.replay()
        changed = [x.clone() for x in inputs]
        changed[1][:4] = changed[2][:4] = k.cpu()
        wanted = exact(tuple(changed), bound, None)
        assert (out.cpu().double() - wanted).abs().max() <= paged_kernels.TOLERANCE[dtype]


@DTYPES
def test_cache_writes_equal_torch(dtype: torch.dtype) -> None:
    wider = torch.randn(500, 7, 1000, device="cuda").to(dtype)
    k, v = wider[:, 2:4], wider[:, 4:6]
    slots = torch.randperm(900, device="cuda")[:500]
    slabs = torch.zeros(2, 900, 2, 1000, dtype=dtype, device="cuda")
    write_cells(*slabs, slots, k, v)
    for slab, x in zip(slabs, (k, v), strict=True):
        assert torch.equal(slab, torch.zeros_like(slab).index_copy_(0, slots, x))


@pytest.mark.parametrize("name", ["qwen3", "qwen2-windows", "mixtral-windows", "gpt2"])
def test_completions_do_not_depend_on_limits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Covers float32, chunked prompts, preempted rows, and CUDA graphs, all of which are used."""
    decoder = random_decoder(ModelConfig.from_hf({**BASE, **ODD[name]}), 0).cuda()
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 21, (12,), generator=draw)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    ids = torch.randint(4, 37, (int(lengths.sum()),), generator=draw).cuda()
    options = GenerationOptions(max_new_tokens=20, temperature=0.7, stop_token_ids=(3,))
    draws: dict[str, Any] = {"seed": 1, "step": 2, "keys": torch.arange(60).cuda()}
    limits = Limits(rows=16, step_tokens=24, page_tokens=4, cache_tokens=400)
    config = decoder.config
    cells = torch.empty(0, config.num_kv_heads, config.head_dim, device="cuda")
    assert paged_kernels.attends(cells, config.num_heads, limits.page_tokens)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        found = generate(decoder, ids, ends, options, limits=limits, **draws)
        wanted = generate(decoder, ids, ends, options, limits=Limits(), **draws)
    assert not caplog.records
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.finished, wanted.finished)
    assert (found.logprobs - wanted.logprobs).abs().max() < 1e-4


def test_rows_are_split_to_fill_the_gpu() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    device = torch.device("cuda", 0)
    assert paged_kernels._splits(2, 32_768, device) == paged_kernels.MOST_SPLITS
    assert paged_kernels._splits(8 * processors, 32_768, device) == 1
