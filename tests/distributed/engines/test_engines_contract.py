"""The contract of every engine, compared with one plain process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines import cases
from tests.distributed.engines.cases import ARCHITECTURE, Setup, batch, model
from tests.pool import RankPool
from tests.support.decoder_folders import to_hf
from tests.support.generated import generate

HERE = "tests.distributed.engines.cases"
SPLITS: dict[str, list[list[int]]] = {
    "one": [list(range(10))],
    "unequal": [[5], [0, 1, 2, 3, 4, 6, 7, 8, 9]],
    "empty": [[], list(range(10))],
    "four": [[1, 5], [], [0, 2, 3, 4, 6, 8, 9], [7]],
}
UNITS = {"root": {}, "layers": {"small_bytes": 0}}
SLOW = {"megatron": pytest.mark.long}
ENGINES = ["fsdp", pytest.param("megatron", marks=SLOW["megatron"])]
SHARDED = [("fsdp", "root"), ("fsdp", "layers"), ("megatron", "root")]
"""Engines, with both ways in which the fsdp engine shards."""
BUDGET = {"max_tokens_per_microbatch": 16}


def plain_decoder(head: Any, *, new_head: bool = True, **architecture: Any) -> Decoder:
    """Return the same initial weights in one plain module, with a value head of zeros."""
    config = ModelConfig.from_hf({**ARCHITECTURE, **architecture})
    decoder = build(config, head)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            zero = new_head and name == "score.weight"
            value = init_tensor(name, tuple(p.shape), config, seed=7)
            p.copy_(torch.zeros_like(p) if zero else value)
    return decoder


def value_model(folder: Path, **architecture: Any) -> Decoder:
    """A model whose values are not all zero, and its folder."""
    folder.mkdir(exist_ok=True)
    decoder = plain_decoder("value", new_head=False, **architecture)
    to_hf(decoder, folder)
    return decoder


def plain_outputs(decoder: Decoder, temperature: float = 1.0) -> dict[str, Tensor]:
    """One sequence at a time, with whole logits."""
    found: list[dict[str, Tensor]] = []
    for item in (batch().take([index]) for index in range(batch().bs)):
        ids = item.tensor("input_ids")
        hidden = decoder(ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        if decoder.head == "value":
            found.append({"values": decoder.values(hidden)})
            continue
        logits = hidden @ decoder.head_weight().t() / temperature
        everything = logits.log_softmax(-1)
        zero = torch.zeros(1)
        logp = everything[:-1].gather(1, ids[1:, None]).squeeze(1)
        entropy = -(everything.exp() * everything).sum(-1)[:-1]
        found.append({"logp": torch.cat([zero, logp]), "entropy": torch.cat([zero, entropy])})
    return {name: torch.cat([row[name] for row in found]) for name in found[0]}


def plain_gradients(decoder: Decoder) -> tuple[float, dict[str, Tensor]]:
    sample = batch()
    total, _ = cases.loss(plain_outputs(decoder), sample)
    total = total / cases.denominator(sample)
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return total.item(), gradients


HEADS = [("lm", False), ("lm", True), ("value", False)]
"""Each with whether word embeddings are tied."""


@pytest.mark.parametrize(
    ("engine", "units", "split", "head", "tied"),
    [
        pytest.param(engine, units, split, *head, marks=SLOW.get(engine, ()))
        for (row, (engine, units)), (column, split), (layer, head) in product(
            enumerate(SHARDED), enumerate(SPLITS), enumerate(HEADS)
        )
        if (row + column + layer) % 3 == 0
    ],
)
def test_loss_and_gradients_equal_one_process(
    ranks: RankPool, tmp_path: Path, engine: str, units: str, split: str, head: str, tied: bool
) -> None:
    """Covers each pair of engine (with its units), layout and head at least once."""
    small = {"tie_word_embeddings": tied, "initializer_range": 0.1}
    setup = Setup(
        engine=engine,
        head=head,
        model=model(architecture={**ARCHITECTURE, **small}, **BUDGET),
        options=UNITS[units],
        split=SPLITS[split],
    )
    if head == "value":
        decoder = value_model(tmp_path / "model", **small)
        setup = replace(setup, source=tmp_path / "model", model=model(architecture=None, **BUDGET))
    else:
        decoder = plain_decoder(head, **small)
    results = ranks(len(setup.split), f"{HERE}:train", setup, save=tmp_path)
    expected_loss, expected = plain_gradients(decoder)
    stats = results[0][0][0]
    assert all(result[0] == results[0][0] for result in results)
    assert stats["loss"] == pytest.approx(expected_loss, rel=2e-6)
    assert stats["tokens"] == stats["denominator"] == sum(cases.LENGTHS)
    squares = sum(g.double().square().sum().item() for g in expected.values())
    assert stats["grad_norm"] == pytest.approx(squares**0.5, rel=2e-6)
    checkpoint = RoleCheckpoint(tmp_path, "actor")
    assert {name for name, _ in checkpoint.weights()} == set(expected)
    for name, gradient in expected.items():
        found = torch.from_numpy(checkpoint.read(f"exp_avg/{name}"))
        difference = (found - gradient).abs().max().item()
        bound = max(2e-6 * gradient.abs().max().item(), 1e-8 * squares**0.5)
        assert difference <= bound, (name, difference, bound)


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_are_sums_over_all_ranks(ranks: RankPool, engine: str) -> None:
    setup = Setup(engine=engine, model=model(**BUDGET), split=SPLITS["empty"])
    stats = ranks(2, f"{HERE}:train", setup)[0][0][0]
    with torch.no_grad():
        _, expected = cases.loss(plain_outputs(plain_decoder("lm")), batch())
    assert stats["weight"] == pytest.approx(expected["weight"].item(), rel=1e-5)
    assert stats["logp"] == pytest.approx(expected["logp"].item(), rel=1e-5)
    assert set(stats) == {
        *("weight", "logp", "loss", "tokens", "denominator", "grad_norm", "lr"),
        *("skipped", "vetoed"),
    }


@pytest.mark.parametrize(
    ("engine", "units", "split"),
    [
        ("fsdp", "root", "unequal"),
        ("fsdp", "layers", "empty"),
        ("fsdp", "layers", "one"),
        pytest.param("megatron", "root", "unequal", marks=SLOW["megatron"]),
        pytest.param("megatron", "root", "empty", marks=SLOW["megatron"]),
    ],
)
def test_outputs_have_the_order_of_the_sample(
    ranks: RankPool, engine: str, units: str, split: str
) -> None:
    setup = Setup(engine=engine, model=model(**BUDGET), options=UNITS[units], split=SPLITS[split])
    results = ranks(len(setup.split), f"{HERE}:outputs_around_training", setup)
    with torch.no_grad():
        expected = plain_outputs(plain_decoder("lm"))
    for share, (before, after, fresh) in zip(setup.split, results, strict=True):
        for name, whole in expected.items():
            wanted = [whole.split(cases.LENGTHS)[index] for index in share]
            assert torch.allclose(before[name], torch.cat([torch.empty(0), *wanted]), atol=2e-5)
            assert torch.equal(after[name], fresh[name])
            assert not share or not torch.equal(after[name], before[name])


@pytest.mark.parametrize("engine", ENGINES)
def test_output_function_can_transform_outputs(ranks: RankPool, engine: str) -> None:
    setup = Setup(engine=engine, model=model(**BUDGET), split=SPLITS["empty"])
    nothing, found = ranks(2, f"{HERE}:forward_with_function", setup)
    with torch.no_grad():
        logp = plain_outputs(plain_decoder("lm"))["logp"]
    assert nothing["sum"].shape == (0,)
    assert torch.allclose(found["sum"], logp + batch().tensor("advantages"), atol=2e-5)


@pytest.mark.parametrize(
    ("units", "split"),
    [("root", "one"), ("layers", "unequal"), ("layers", "empty"), ("root", "four")],
)
def test_completions_do_not_depend_on_the_ranks(ranks: RankPool, units: str, split: str) -> None:
    setup = Setup(model=model(), options=UNITS[units], split=SPLITS[split])
    options = GenerationOptions(max_new_tokens=6, stop_token_ids=(3, 4, 5))
    results = ranks(len(setup.split), f"{HERE}:completions", setup, options)
    found = {name: rows for result in results for name, rows in result.items()}
    sample = batch()
    assert set(found) == set(sample.ids)
    for step in range(2):
        out = generate(
            plain_decoder("lm"),
            sample.tensor("input_ids"),
            sample.cu_seqlens("input_ids"),
            options,
            seed=3,
            step=step,
            keys=torch.arange(10),
        )
        lengths = out.lengths.tolist()
        for name, tokens, logp in zip(
            sample.ids, out.tokens.split(lengths), out.logprobs.split(lengths), strict=True
        ):
            assert found[name][step][0] == tokens.tolist()
            assert found[name][step][1] == pytest.approx(logp.tolist(), abs=1e-5)


@pytest.mark.parametrize("units", UNITS)
def test_failed_generation_does_not_change_the_engine(
    ranks: RankPool, tmp_path: Path, units: str
) -> None:
    setup = Setup(model=model(), options=UNITS[units], split=SPLITS["unequal"])
    for message, after, fresh in ranks(2, f"{HERE}:saved_after_failed_generation", setup, tmp_path):
        assert message
        assert after == fresh


def test_step_after_a_failed_step_is_rejected_if_torch_cannot_reset_fsdp(ranks: RankPool) -> None:
    """Otherwise gradients of the failed step would silently be added to those of the next one."""
    setup = Setup(model=model(), options=UNITS["layers"], split=[[0, 1, 2], [3, 4]])
    for message in ranks(2, f"{HERE}:refused_after_failed_training", setup):
        assert "an earlier step failed" in message


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 cannot reset FSDP"
)
@pytest.mark.parametrize(
    ("units", "dtype"), [("root", "float32"), ("layers", "float32"), ("layers", "bfloat16")]
)
def test_failed_loss_does_not_affect_the_next_step(
    ranks: RankPool, tmp_path: Path, units: str, dtype: str
) -> None:
    """Gathered weights and gradients of the failed step are dropped."""
    split = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    setup = Setup(model=model(dtype=dtype, **BUDGET), options=UNITS[units], split=split)
    for message, sharded, after, fresh in ranks(
        2, f"{HERE}:saved_after_failed_training", setup, tmp_path
    ):
        assert message in ("in round 2", "in round 3")
        assert sharded
        assert after == fresh


@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_is_bit_exact(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    settings = model(optimizer={"betas": (0.9, 0.95), "schedule": "cosine"}, **BUDGET)
    setup = Setup(engine=engine, model=settings, split=SPLITS["unequal"])
    straight, first, second = (tmp_path / name for name in ("straight", "first", "second"))
    for folder in (straight, first, second):
        folder.mkdir()
    whole = ranks(2, f"{HERE}:train", setup, range(3), save=straight)
    begun = ranks(2, f"{HERE}:train", setup, range(1), save=first)
    rest = ranks(2, f"{HERE}:train", setup, range(1, 3), load=first, save=second)
    assert whole[0][0] == begun[0][0] + rest[0][0]
    assert len({stats["lr"] for stats in whole[0][0]}) == 3
    for rank in range(2):
        name = f"actor.{rank}.safetensors"
        assert whole[rank][1] == rest[rank][1]
        assert (straight / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoint_loads_on_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    folders = [tmp_path / str(index) for index in range(3)]
    settings = model(optimizer={"betas": (0.9, 0.95)})
    for folder in folders:
        folder.mkdir()
    split = [[0, 1, 2], [3, 4]]
    setup = Setup(engine=engine, model=settings, split=split)
    ranks(2, f"{HERE}:train", setup, range(2), save=folders[0])
    for n, source, target in ((1, folders[0], folders[1]), (4, folders[1], folders[2])):
        setup = Setup(engine=engine, model=settings, split=[[]] * n)
        ranks(n, f"{HERE}:train", setup, range(2, 2), load=source, save=target)
    checkpoints = [RoleCheckpoint(folder, "actor") for folder in folders]
    assert [checkpoint.ranks for checkpoint in checkpoints] == [2, 1, 4]
    assert [checkpoint.step for checkpoint in checkpoints] == [2, 2, 2]
    for name in checkpoints[0].layout.tensors:
        values = [checkpoint.read(name) for checkpoint in checkpoints]
        assert np.any(values[0])
        assert np.array_equal(values[0], values[1])
        assert np.array_equal(values[0], values[2])


@pytest.mark.parametrize(("units", "split"), [("layers", "one"), ("root", "unequal")])
def test_offload_frees_memory_and_onload_restores_it(
    ranks: RankPool, units: str, split: str
) -> None:
    """Covers all weights and moments. Other tests cover megatron, which also has gradients."""
    setup = Setup(model=model(**BUDGET), options=UNITS[units], split=SPLITS[split])
    for before, during, found, kept in ranks(len(setup.split), f"{HERE}:offloaded", setup):
        assert before > 0
        assert during == 0
        assert found == kept
