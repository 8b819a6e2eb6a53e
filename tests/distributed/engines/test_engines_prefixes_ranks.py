"""Shared prefixes of sequences are computed once, without a change of outputs and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.engines import cases
from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.one_process import (
    assert_gradients,
    gradients,
    norm_of,
    of_folder,
    random_model,
)
from tests.distributed.engines.prefix_cases import READ, TOKENS, group_batch
from tests.distributed.engines.test_engines_layouts import MODELS
from tests.distributed.engines.test_engines_megatron import outputs_of
from tests.pool import RankPool

TRAIN = "tests.distributed.engines.prefix_cases:train_groups"
ALL = [[0, 1, 2, 3]]
SPLIT = [[3], [0, 1, 2]]
WINDOWS = {**MODELS["mistral"], "sliding_window": 39}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


@pytest.mark.parametrize(
    ("family", "head", "split", "settings"),
    [
        pytest.param("qwen3", "lm", ALL, {}, id="lm"),
        pytest.param("qwen2", "value", ALL, {}, id="value"),
        pytest.param("gpt2", "lm", ALL, {"gradient_checkpointing": "full"}, id="full"),
        pytest.param("qwen2", "lm", SPLIT, {"gradient_checkpointing": "selective"}, id="d2"),
    ],
)
@pytest.mark.parametrize("separate", [False, True], ids=["items", "sequences"])
def test_results_with_shared_prefixes_equal_whole_sequences(
    ranks: RankPool,
    tmp_path: Path,
    family: str,
    head: Any,
    split: list[list[int]],
    settings: dict[str, Any],
    separate: bool,
) -> None:
    """The reference is one process in float64 that computes each sequence separately."""
    decoder = random_model(tmp_path / "model", MODELS[family], head).double()
    setup = Setup(model=model(architecture=MODELS[family], **settings), head=head, split=split)
    setup = of_folder(setup, tmp_path / "model")
    results = ranks(len(split), TRAIN, setup, separate, save=tmp_path)
    assert sum(read[0] for _, _, read in results) == READ
    sample = group_batch().sequences()
    outputs = outputs_of(decoder, sample)
    by_item = group_batch().item_lengths("input_ids")
    for name, wanted in outputs.items():
        parts = wanted.detach().split_with_sizes(by_item)
        for (found, _, _), items in zip(results, split, strict=True):
            expected = torch.cat([parts[item] for item in items])
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
    total, _ = cases.loss(outputs, sample)
    mean = total / TOKENS
    mean.backward()  # type: ignore[no-untyped-call]
    stats = results[0][1]
    assert stats["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert stats["tokens"] == TOKENS
    assert stats["grad_norm"] == pytest.approx(norm_of(gradients(decoder)), rel=1e-5)
    assert_gradients(tmp_path, gradients(decoder), 1e-5)


@pytest.mark.parametrize(
    ("sizes", "settings", "tokens"),
    [
        pytest.param({"dp": 1}, {"lora": {"rank": 2}}, READ, id="adapters"),
        pytest.param({"dp": 1}, {"lora": {"rank": 2, "dropout": 0.5}}, TOKENS, id="dropout"),
        pytest.param({"dp": 1}, {"architecture": WINDOWS}, TOKENS, id="windows"),
        pytest.param({"dp": 1}, {"architecture": {**WINDOWS, "sliding_window": 40}}, READ, id="40"),
        pytest.param(
            {"dp": 1}, {"architecture": {**MODELS["mixtral"], **BALANCED}}, TOKENS, id="balance"
        ),
        pytest.param({"dp": 1}, {"architecture": MODELS["mixtral"]}, READ, id="experts"),
        pytest.param({"tp": 2}, {}, TOKENS, id="t2"),
        pytest.param({"cp": 2}, {}, TOKENS // 2, id="c2"),
    ],
)
def test_prefixes_are_shared_only_if_results_stay_exact(
    ranks: RankPool, sizes: dict[str, int], settings: dict[str, Any], tokens: int
) -> None:
    setup = Setup(
        model=model(**{"architecture": MODELS["qwen3"], **settings}), split=ALL, sizes=sizes
    )
    results = ranks(max(sizes.values()), TRAIN, setup, False)
    assert {read[0] for _, _, read in results} == {tokens}
    assert {read[-1] for _, _, read in results} == {tokens}


def test_token_budget_counts_a_shared_prefix_once(ranks: RankPool) -> None:
    """The largest group has 52 distinct tokens. Its sequences have 145 tokens together."""
    settings = model(architecture=MODELS["qwen3"], max_tokens_per_microbatch=52)
    ((few, _, read),) = ranks(1, TRAIN, Setup(model=settings, split=ALL), True)
    half = len(read) // 2
    assert read[:half] == read[half:]
    assert sum(read[:half]) == READ
    assert max(read) == 52
    ((alone, _, read),) = ranks(
        1, TRAIN, Setup(model={**settings, "max_tokens_per_microbatch": 1}, split=ALL), True
    )
    assert sum(read) == 2 * TOKENS
    for name, values in few.items():
        torch.testing.assert_close(values, alone[name], rtol=1e-5, atol=1e-5)
