"""Host memory that CUDA page-locks for copies of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slurmrl.engines.fsdp.engine import FSDPEngine
from tests.null_gpu import cases, device
from tests.null_gpu.values import SmallValues

ODD = {**cases.QWEN_7B, "num_hidden_layers": 2, "vocab_size": 40000}
"""Sizes well above a power of two."""
TWO_LAYERS = {**cases.QWEN_1_5B, "num_hidden_layers": 2}


@pytest.fixture
def engine() -> Iterator[Any]:
    with cases.first_of(8):
        made = cases.engine(TWO_LAYERS)
        assert isinstance(made, FSDPEngine)
        yield made


def test_snapshot_pins_one_buffer_of_the_state_size(engine: Any) -> None:
    """torch's allocator would round each tensor's size up to a power of two. A second snapshot
    reuses the buffer.
    """
    state = sum(tensor.nbytes for tensor in engine._state().values())
    for locked in (1, 0):
        with device.counted() as found:
            snapshot = engine.snapshot()
        assert snapshot is not None
        assert found["pinned"] == locked
        assert found["pinned_bytes"] == pytest.approx(state * locked, rel=1e-3)
        assert found["waits"] == 1


def test_offload_pins_one_buffer_and_frees_the_gpu(engine: Any) -> None:
    state = sum(tensor.nbytes for tensor in engine._state().values())
    before = torch.cuda.memory_allocated()
    with device.counted() as found:
        engine.offload()
    assert found["pinned"] == 1
    assert found["pinned_bytes"] == pytest.approx(state, rel=1e-3)
    assert before - torch.cuda.memory_allocated() >= state
    engine.onload()
    assert torch.cuda.memory_allocated() == before


def test_host_weights_and_gradients_are_pinned_in_place() -> None:
    """With ``cpu_offload``, torch pins both without rounding up to powers of two, and a second step
    reuses them.
    """
    with cases.first_of(8):
        with device.counted() as found:
            engine: Any = cases.engine(ODD, cpu_offload=True)
        weights = sum(tensor.nbytes for tensor in engine._shards.local().values())
        assert found["pinned_bytes"] == pytest.approx(weights, rel=0.01)
        sample = cases.batch([64] * 4)
        for expected in (weights, 0):
            with device.counted() as found, SmallValues():
                engine.train_batch(sample, cases.ppo_loss, 1.0)
            assert found["pinned_bytes"] == pytest.approx(expected, rel=0.01)
