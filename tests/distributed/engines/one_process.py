"""Models in one process, loaded from the folders of engines, and comparisons of engines
with them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines import cases
from tests.distributed.engines.cases import LENGTHS, Setup, batch
from tests.distributed.engines.test_engines_megatron import MARGIN, margins, outputs_of
from tests.pool import RankPool
from tests.support.decoder_folders import to_hf


def random_model(
    folder: Path, architecture: dict[str, Any], head: Any = "lm", seed: int = 7
) -> Decoder:
    """Make a model whose tensors, including biases and norms, all have random values. Return the
    model and its folder.
    """
    folder.mkdir(exist_ok=True)
    config = ModelConfig.from_hf(architecture)
    decoder = build(config, head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(init_tensor(name, tuple(p.shape), config, seed))
            if p.dim() == 1:
                p += 0.1 * torch.randn(p.shape, generator=generator)
        for constant in decoder.constants().values():
            constant.copy_(torch.randn(constant.shape, generator=generator))
    to_hf(decoder, folder)
    return decoder


def of_folder(setup: Setup, folder: Path) -> Setup:
    """Return the same model with the weights of a folder."""
    return replace(setup, source=folder, model={**setup.model, "architecture": None})


def assert_as_one_process(
    ranks: RankPool, folder: Path, setup: Setup, architecture: dict[str, Any]
) -> None:
    """Compare the loss, gradient norm and every gradient of a step within the bounds of the
    contract.
    """
    decoder = random_model(folder / "model", architecture, setup.head).double()
    setup = of_folder(setup, folder / "model")
    results = ranks(setup.ranks, "tests.distributed.engines.cases:train", setup, save=folder)
    stats = results[0][0][0]
    assert all(result[0] == [stats] for result in results)
    sample = batch()
    with margins(decoder) as routed:
        total, _ = cases.loss(outputs_of(decoder, sample), sample)
    assert min(routed, default=1.0) > MARGIN
    expected = total / cases.denominator(sample)
    expected.backward()  # type: ignore[no-untyped-call]
    assert stats["loss"] == pytest.approx(expected.item(), rel=2e-6)
    assert stats["tokens"] == sum(LENGTHS)
    found = gradients(decoder)
    assert stats["grad_norm"] == pytest.approx(norm_of(found), rel=2e-6)
    assert_gradients(folder, found, constants=decoder.constants())


def assert_gradients(
    checkpoint: Path,
    expected: dict[str, Tensor],
    bound: float = 2e-6,
    constants: dict[str, Tensor] | None = None,
) -> None:
    """Compare the first moments after one step, which are the gradients. Constants are
    unchanged.
    """
    saved, constants = RoleCheckpoint(checkpoint, "actor"), constants or {}
    assert {name for name, _ in saved.weights()} == set(expected) | set(constants)
    for name, values in constants.items():
        assert torch.equal(torch.from_numpy(saved.read(name)), values), name
    whole = norm_of(expected)
    for name, gradient in expected.items():
        found = torch.from_numpy(saved.read(f"exp_avg/{name}"))
        allowed = max(bound * gradient.abs().max().item(), 1e-8 * whole)
        difference = (found - gradient).abs().max().item()
        assert difference <= allowed, (name, difference, allowed)


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}


def norm_of(tensors: dict[str, Tensor]) -> float:
    """The norm of all gradients together."""
    squares = sum(one.double().square().sum().item() for one in tensors.values())
    return float(squares**0.5)
