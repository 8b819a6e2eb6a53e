"""Kernels for paged key-value caches compile for a GPU, and generation launches few of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slurmrl.data.sample import SequenceSample
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.rollouts.generation.native import native_rollout as rollout_module
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.tensors.ops import paged_kernels
from slurmrl.tensors.ops.paged_kernels import Sizes, example, paged_attention, write_cells
from tests.null_gpu import cases, device
from tests.null_gpu.values import SmallValues
from tests.support.generated import generated

LAYERS = 4
FOUR_LAYERS = {**cases.QWEN_1_5B, "num_hidden_layers": LAYERS}
ROWS, PROMPT = 4, 64
FEW, MORE = 9, 25
LAUNCHES_OF_A_TOKEN = 165
"""Some 15 percent above what was measured."""


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the kernels, because the null GPU computes nothing that could be compared."""
    monkeypatch.setenv("SLURMRL_OPS", "native")
    monkeypatch.setattr(paged_kernels, "_attention_failure", lambda sizes: "")
    monkeypatch.setattr(paged_kernels, "_write_failure", lambda device, dtype: "")


@pytest.mark.parametrize("dtype", paged_kernels.TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(12, 2, 128), (4, 4, 64), (8, 1, 256)])
def test_paged_kernels_compile_with_the_expected_launches(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, trusted: None
) -> None:
    """Rows take one launch, split rows two. The host never waits."""
    sizes = Sizes(torch.device("cuda", 0), dtype, heads, kv_heads, size, 16)
    for longest, chunk, window, launches in (
        (paged_kernels.LONG, 1, None, 2),
        (paged_kernels.SHORT, 1, 50, 1),
        (paged_kernels.LONG, 7, 50, 1),
        (paged_kernels.LONG, 7, None, 2),
    ):
        inputs = tuple(x.cuda() for x in example(sizes, longest, chunk))
        with device.counted() as counts:
            paged_attention(
                *inputs, page=16, longest=longest, chunk=chunk, scale=0.1, window=window
            )
        assert (counts["launches"], counts["waits"]) == (launches, 0)
    q, keys, values, *_ = inputs
    slots = torch.arange(len(q)).cuda()
    k = torch.zeros((len(q), kv_heads, size), dtype=dtype).cuda()
    with device.counted() as counts:
        write_cells(keys, values, slots, k, k)
    assert (counts["launches"], counts["waits"]) == (1, 0)


def test_paged_kernels_are_not_used_if_their_check_fails(caplog: pytest.LogCaptureFixture) -> None:
    sizes = (torch.device("cuda", 0), torch.bfloat16, 6, 3, 32, 16)
    assert not paged_kernels.attends(*sizes)
    (record,) = caplog.records
    assert "copies the key-value cache" in record.getMessage()


@pytest.fixture
def ranks() -> Iterator[None]:
    with cases.first_of(8), SmallValues():
        yield


def test_token_of_a_whole_batch_makes_the_expected_gpu_calls(
    trusted: None, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, whole batches are served as requests. Without CUDA graphs, each call launches a few
    kernels per layer, and the host waits for the tokens of the previous call.
    """
    made: list[ContinuousBatch] = []

    class Recorded(ContinuousBatch):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            self._runner._decode._capture = None
            made.append(self)

    monkeypatch.setattr(rollout_module, "ContinuousBatch", Recorded)
    engine = cases.engine(FOUR_LAYERS, trained=False)

    def generate(new_tokens: int) -> None:
        sample = SequenceSample(
            tuple(f"item{index}" for index in range(ROWS)),
            {"prompt_ids": [[PROMPT]] * ROWS},
            data={"prompt_ids": torch.arange(PROMPT * ROWS) % 100},
        )
        options = GenerationOptions(max_new_tokens=new_tokens, stop_token_ids=(151645,))
        generated(engine, sample, options, seed=1, step=1, keys=torch.arange(ROWS))

    generate(FEW)
    with device.counted() as few, device.waits() as sites_of_few:
        generate(FEW)
    with device.counted() as more, device.waits() as sites:
        generate(MORE)
    assert [batch.sampled for batch in made] == [ROWS * FEW, ROWS * FEW, ROWS * MORE]
    steps = MORE - FEW
    launches = sum(more[name] - few[name] for name in ("launches", "products")) / steps
    assert launches <= LAUNCHES_OF_A_TOKEN
    assert (more["waits"] - few["waits"]) / steps <= 1, sites - sites_of_few
