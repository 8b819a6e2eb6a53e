"""The load-balancing loss of experts is that of an optimizer step's whole batch, however the batch
is cut into micro-batches and spread over ranks."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.models.decoder import Decoder
from slurmrl.models.moe import SparseMLP
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch
from tests.distributed.engines.one_process import (
    assert_gradients,
    gradients,
    of_folder,
    random_model,
)
from tests.distributed.engines.test_engines_layouts import LAYOUTS, MODELS, setup_of
from tests.distributed.engines.test_engines_megatron import MARGIN, margins, outputs_of
from tests.pool import RankPool

ARCHITECTURE = MODELS["qwen3_moe"]
COEFFICIENT = 3.0
"""So large that most of a router's gradient is the loss's."""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def reference(decoder: Decoder, steps: int = 1) -> dict[str, Tensor]:
    """Gradients in float64 of one process that has all router logits of the batch at once."""
    logits: dict[SparseMLP, list[Tensor]] = defaultdict(list)
    for block in decoder.modules():
        if isinstance(block, SparseMLP):
            block.gate.register_forward_hook(
                lambda _, __, out, block=block: logits[block].append(out)
            )
    sample = batch(steps - 1)
    with margins(decoder) as routed:
        total, _ = cases.loss(outputs_of(decoder, sample), sample)
    assert min(routed) > MARGIN
    losses = []
    for block, rows in logits.items():
        probabilities = torch.cat(rows).softmax(-1)
        tokens, experts = probabilities.shape
        ranked = probabilities.argsort(-1, descending=True)[:, : block.per_token]
        fractions = torch.stack([(ranked == e).double().sum() for e in range(experts)]) / tokens
        losses.append(experts * (fractions * probabilities.mean(0)).sum())
    balance = COEFFICIENT * torch.stack(losses).mean()
    (total / cases.denominator(sample) + balance).backward()  # type: ignore[no-untyped-call]
    return gradients(decoder)


def setup_at(folder: Path, sizes: dict[str, int], options: dict[str, Any]) -> Setup:
    sequence = options.pop("sequence", False)
    setup = setup_of(sizes, {**ARCHITECTURE, **BALANCED}, sequence=sequence, **options)
    return of_folder(setup, folder)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("d1", {"max_tokens_per_microbatch": 1000}),
        ("d1", {"max_tokens_per_microbatch": 16}),
        ("d1", {"max_tokens_per_microbatch": 1, "gradient_checkpointing": "full"}),
        ("d2", {"layers": True, "gradient_checkpointing": "selective"}),
        ("d4", {}),
        ("d2t2", {"sequence": True}),
        ("c2t2", {}),
        ("d2c2", {"layers": True}),
    ],
)
def test_gradients_are_those_of_the_whole_batch(
    ranks: RankPool, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """In d4 a rank has nothing at all, in the others the numbers of micro-batches differ."""
    random_model(tmp_path / "model", {**ARCHITECTURE, **BALANCED})
    decoder = random_model(tmp_path / "plain", ARCHITECTURE).double()
    setup = setup_at(tmp_path / "model", LAYOUTS.get(layout, {"dp": 1}), dict(options))
    ranks(setup.ranks, "tests.distributed.engines.cases:train", setup, save=tmp_path)
    expected = reference(decoder)
    router = expected["model.layers.1.mlp.gate.weight"]
    assert router.abs().max() > 0.01 * max(one.abs().max() for one in expected.values())
    assert_gradients(tmp_path, expected, bound=4e-6)
