"""The share of an update that remains in the dtype of generation."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.config.schema import Config
from slurmrl.engines.base import Engine
from slurmrl.engines.fsdp.parameters import MergedWeights
from slurmrl.plan.dataflow import Method
from slurmrl.plan.precision import rounds_to
from slurmrl.tensors.checkpoint.export import survival
from slurmrl.workers.distributed import RunStore
from slurmrl.workers.worker.executor import MOST, UpdateKept
from slurmrl.workers.worker.setup import wait_until_up
from tests.unit.algorithms.test_algorithms_behavior import (
    BFLOAT16_SERVER,
    OTHERS,
    SERVER,
    configured,
)

TRAIN: Any = SimpleNamespace(method=Method.TRAIN_STEP, role="actor")


class Held:
    """An engine's weights on a rank."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def storages(self) -> dict[str, Tensor]:
        return self.tensors

    updated = Engine.updated


def kept(engine: Any, update: Tensor, dtype: str = "bfloat16") -> float | None:
    """Return the reported share for this update of ``w``."""
    measure = UpdateKept(dtype)
    before = measure.before(TRAIN, engine)
    assert before is not None
    engine.tensors["w"].add_(update)
    found = measure.stats(before, engine)
    return found["update_kept"][0] if found else None


def weights(size: int = 4096) -> Tensor:
    """Return weights with the values of a bfloat16 checkpoint."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 0.05
    return noise.bfloat16().float()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kept_share_of_updates_grows_as_small_updates_add_up(dtype: str) -> None:
    """Adam's updates at a learning rate of 1e-6 are smaller than the distance between bfloat16
    values.
    """
    signs = torch.sign(torch.randn(4096, generator=torch.Generator().manual_seed(2)))
    first = kept(Held(w=weights()), 1e-7 * signs, dtype)
    large = kept(Held(w=weights()), 1e-2 * signs, dtype)
    assert first is not None
    assert large is not None
    assert first < 0.2 < 0.95 < large


def test_kept_share_uses_all_weights_of_small_models() -> None:
    start, update = weights(), 1e-4 * torch.randn(4096, generator=torch.Generator().manual_seed(3))
    share = survival(start.numpy(), (start + update).numpy(), "bfloat16").share
    assert kept(Held(w=start.clone()), update) == pytest.approx(share)


def test_large_models_are_sampled_evenly() -> None:
    """In a matrix with different columns, no column is left out."""
    rows = 8 * MOST // 512
    engine: Any = Held(
        w=weights(512).repeat(rows), table=torch.arange(4), half=torch.ones(9).half()
    )
    before = UpdateKept("bfloat16").before(TRAIN, engine)
    assert before is not None
    assert MOST / 2 < before.size <= MOST + 1
    assert set(before.tolist()) == set(weights(512).tolist())


def test_call_without_update_reports_no_share() -> None:
    assert kept(Held(w=weights()), torch.zeros(4096)) is None


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (TRAIN, None),
        (SimpleNamespace(method=Method.TRAIN_STEP, role="critic"), "bfloat16"),
        (SimpleNamespace(method=Method.INFERENCE, role="actor"), "bfloat16"),
    ],
)
def test_kept_share_is_measured_only_for_training_calls(call: Any, dtype: str | None) -> None:
    engine: Any = Held(w=weights())
    assert UpdateKept(dtype).before(call, engine) is None


@pytest.mark.parametrize(
    ("dtype", "rollout", "expected"),
    [
        ("float32", {}, None),
        ("bfloat16", {}, "bfloat16"),
        ("float32", SERVER, None),
        ("float32", BFLOAT16_SERVER, "bfloat16"),
        ("float32", {**SERVER, "server_args": ["--dtype=half"]}, "float16"),
        ("bfloat16", {**SERVER, "server_args": ["--dtype", "float"]}, None),
        ("bfloat16", OTHERS, None),
    ],
)
def test_kept_share_uses_the_dtype_of_the_generation_engine(
    dtype: str, rollout: dict[str, Any], expected: str | None
) -> None:
    config: Config = configured(dtype, rollout)
    assert rounds_to(config) == expected
    for method, wanted in ((Method.GENERATE, expected), (Method.INFERENCE, None)):
        plan: Any = SimpleNamespace(calls=[SimpleNamespace(method=method)])
        settings: Any = SimpleNamespace(config=config)
        engine: Any = Held(w=weights())
        measured = UpdateKept.of(settings, plan).before(TRAIN, engine)
        assert (measured is not None) == bool(wanted)


@pytest.mark.parametrize(
    ("rollout", "types", "expected"),
    [
        (OTHERS, {"float32"}, None),
        (OTHERS, {"float32", "float16", "bfloat16"}, "bfloat16"),
        (SERVER, {"bfloat16"}, None),
    ],
)
def test_dtypes_of_external_servers_reach_all_ranks(
    tmp_path: Path, rollout: dict[str, Any], types: set[str], expected: str | None
) -> None:
    """One rank asks the servers. Servers of the run have the dtype of the configuration."""
    config = configured("float32", rollout)
    settings: Any = SimpleNamespace(config=config)
    plan: Any = SimpleNamespace(
        models_of=lambda group: {"rollout": SimpleNamespace(engine="sglang")}
    )
    store = RunStore(tmp_path / "meeting", 2, timedelta(seconds=60))
    for known in (types, None):
        engine: Any = SimpleNamespace(served_types=known, wait_until_up=lambda report: None)
        served = wait_until_up(settings, plan, [engine], store, lambda: None)
        assert rounds_to(config, served) == expected


def test_kept_share_with_adapters_uses_merged_weights() -> None:
    """The weights are frozen. Generation uses the rounded sums of weights and adapters."""
    draw = torch.Generator().manual_seed(4)
    a = torch.randn(2, 64, generator=draw)
    layer = {
        "q_proj.weight": weights(48 * 64).view(48, 64).bfloat16(),
        "q_proj.lora_B": torch.zeros(48, 2),
        "q_proj.lora_A": a,
        "norm.weight": torch.ones(64).bfloat16(),
    }
    adapters: Any = SimpleNamespace(scale=0.5, rank=2)
    context: Any = SimpleNamespace(axis_size=lambda axis: 1, device=torch.device("cpu"))
    engine: Any = SimpleNamespace(
        updated=lambda most: MergedWeights(layer, adapters, context).sample(most)
    )
    measure = UpdateKept("bfloat16")
    before = measure.before(TRAIN, engine)
    assert before is not None
    b = 1e-4 * torch.randn(48, 2, generator=draw)
    layer["q_proj.lora_B"].add_(b)
    start = layer["q_proj.weight"].float()
    wanted = survival(start.numpy(), (start + 0.5 * b @ a).numpy(), "bfloat16").share
    assert wanted is not None
    assert 0.1 < wanted < 0.9
    assert measure.stats(before, engine)["update_kept"][0] == pytest.approx(wanted, rel=1e-3)
