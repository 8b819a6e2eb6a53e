"""The load-balancing loss of experts covers the whole batch of an optimizer step, for any
micro-batches and ranks.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import SparseMLP
from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, batch, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.one_process import (
    assert_gradients,
    gradients,
    of_folder,
    random_model,
)
from tests.distributed.engines.test_engines_layouts import LAYOUTS, MODELS, setup_of
from tests.distributed.engines.test_engines_megatron import (
    BUDGET,
    MARGIN,
    MOE,
    grid,
    margins,
    outputs_of,
    start,
)
from tests.pool import RankPool

ARCHITECTURE = MODELS["qwen3_moe"]
COEFFICIENT = 3.0
"""So large that most of a router's gradient is the loss's."""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}


def reference(decoder: Decoder) -> dict[str, Tensor]:
    """Return gradients in float64 from one process that has all router logits of the
    batch at once.
    """
    logits: dict[SparseMLP, list[Tensor]] = defaultdict(list)
    for block in decoder.modules():
        if isinstance(block, SparseMLP):
            block.gate.register_forward_hook(
                lambda _, __, out, block=block: logits[block].append(out)
            )
    sample = batch()
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
def test_balance_loss_gradients_are_computed_over_the_whole_batch(
    ranks: RankPool, tmp_path: Path, layout: str, options: dict[str, Any]
) -> None:
    """In d4, one rank has no item. In the other layouts, the numbers of micro-batches differ."""
    random_model(tmp_path / "model", {**ARCHITECTURE, **BALANCED})
    decoder = random_model(tmp_path / "plain", ARCHITECTURE).double()
    setup = setup_at(tmp_path / "model", LAYOUTS.get(layout, {"dp": 1}), dict(options))
    ranks(setup.ranks, "tests.distributed.engines.cases:train", setup, save=tmp_path)
    expected = reference(decoder)
    router = expected["model.layers.1.mlp.gate.weight"]
    assert router.abs().max() > 0.01 * max(one.abs().max() for one in expected.values())
    assert_gradients(tmp_path, expected, bound=4e-6)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        pytest.param(placed(dp=2, experts=grid(1, 1, 2, 1)), {}, id="d2 e2"),
        pytest.param(placed(tp=2, sp=True, pp=2), {"gradient_checkpointing": "full"}, id="t2 p2"),
        pytest.param(placed(pp=2, v=2), {}, id="p2 v2", marks=pytest.mark.long),
        pytest.param(
            placed(cp=2, experts=grid(1, 1, 2, 1)),
            {"gradient_checkpointing": "selective"},
            id="c2 e2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_megatron_balance_loss_gradients_are_computed_over_the_whole_batch(
    ranks: RankPool, tmp_path: Path, where: Placed, options: dict[str, Any]
) -> None:
    """Covers pipelines and padded parts of sequences."""
    for name, architecture in (("model", {**MOE, **BALANCED}), ("plain", MOE)):
        (tmp_path / name).mkdir()
        decoder = start(tmp_path / name, architecture, "lm")
    (tmp_path / "0").mkdir()
    settings = model(architecture=None, **BUDGET, **options)
    case = Case(where, settings, source=tmp_path / "model")
    train = "tests.distributed.engines.megatron_cases:train"
    ranks(len(where.ranks), train, case, save=tmp_path, deadline_s=400.0)
    assert_gradients(tmp_path / "0", reference(decoder), bound=4e-6)
