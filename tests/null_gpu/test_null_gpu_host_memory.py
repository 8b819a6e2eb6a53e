"""Host memory that CUDA page-locks for copies of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slurmrl.engines.fsdp.engine import FSDPEngine
from tests.null_gpu import cases, device

TWO_LAYERS = {**cases.QWEN_1_5B, "num_hidden_layers": 2}


@pytest.fixture
def engine() -> Iterator[Any]:
    with cases.first_of(8):
        made = cases.engine(TWO_LAYERS)
        assert isinstance(made, FSDPEngine)
        yield made


def test_a_snapshot_locks_one_buffer_of_the_size_of_the_state(engine: Any) -> None:
    """torch's own allocator would lock each tensor's size rounded up to a power of two. A second
    snapshot reuses the buffer."""
    state = sum(tensor.nbytes for tensor in engine._state().values())
    for locked in (1, 0):
        with device.counted() as found:
            snapshot = engine.snapshot()
        assert snapshot is not None
        assert found["pinned"] == locked
        assert found["pinned_bytes"] == pytest.approx(state * locked, rel=1e-3)
        assert found["waits"] == 1


def test_offloading_locks_one_buffer_and_frees_the_gpu(engine: Any) -> None:
    state = sum(tensor.nbytes for tensor in engine._state().values())
    before = torch.cuda.memory_allocated()
    with device.counted() as found:
        engine.offload()
    assert found["pinned"] == 1
    assert found["pinned_bytes"] == pytest.approx(state, rel=1e-3)
    assert before - torch.cuda.memory_allocated() >= state
    engine.onload()
    assert torch.cuda.memory_allocated() == before
