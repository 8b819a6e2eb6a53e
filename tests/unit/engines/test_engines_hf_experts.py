"""Experts of models of transformers: recorded in generation, replayed in training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slurmrl.algorithms.rollout_calls import add_experts
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.errors import UsageError
from slurmrl.models.experts import Replayed
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_routers import HFRouters, refusal
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, WeightVersion
from tests.support.families import tiny
from tests.unit.engines.test_engines_hf_joins import CHANGES, request, steps
from tests.unit.engines.test_engines_waits import engine

ROUTED: dict[str, dict[str, Any]] = {
    "softmax": tiny("mixtral", **CHANGES),
    "softmax of the chosen": tiny("gpt_oss", **CHANGES),
    "groups of experts": tiny("deepseek_v3", **CHANGES, n_routed_experts=8, n_group=2),
    "states": tiny("qwen3_5_moe_text", **CHANGES),
}
RECORDING = GenerationOptions(max_new_tokens=9, stop_token_ids=(3, 4, 5), experts=True)


@contextmanager
def chosen(model: HFModel) -> Iterator[list[Tensor]]:
    """Collect the experts [tokens, K] of each later call of a block."""
    found: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        found.append(next(each for each in inputs if not each.is_floating_point()).detach().clone())

    blocks = [each for name, each in model.named_modules() if name.endswith(".experts")]
    handles = [each.register_forward_pre_hook(keep) for each in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def in_one_call(model: HFModel, tokens: tuple[int, ...]) -> Tensor:
    """Return the experts [tokens, L * K] of a sequence that is computed in one call."""
    with chosen(model) as found, torch.no_grad():
        model(torch.tensor(tokens), torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
    return torch.cat(found, dim=1)


def model_of(name: str, seed: int = 0) -> HFModel:
    config = HFConfig.from_hf(ROUTED[name])
    return HFModel(config, "lm", source=None, seed=seed, dtype=torch.float32)


def sets(experts: Tensor, each: int = 2) -> Tensor:
    """Return the experts of a block in ascending order, because their order has no effect."""
    return experts.view(len(experts), -1, each).long().sort(-1).values


@pytest.mark.parametrize("family", ROUTED)
def test_recorded_experts_have_processed_the_tokens(family: str) -> None:
    """Rows join, end, and are prefilled again after an update of the weights."""
    model = model_of(family)
    asked = [request(n, 3 + n, RECORDING) for n in range(5)]

    async def run() -> list[Completion]:
        engine = HFRollout(model, "0.1", 16, rows=5, joins=True)
        plain = engine.submit(request(9, 4, GenerationOptions(max_new_tokens=6)))
        futures = []
        for each in asked:
            futures.append(engine.submit(each))
            await steps(2)
        await engine.update_weights(WeightVersion(name="1.1"))
        assert {each.experts for each in await plain} == {None}
        return [one for made in await asyncio.gather(*futures) for one in made]

    for place, made in enumerate(asyncio.run(run())):
        tokens = (*asked[place // 2].prompt, *made.tokens)
        assert made.experts is not None
        assert made.experts.dtype == "int16"
        found = torch.from_numpy(made.experts)
        assert (found[-1] == -1).all()
        assert torch.equal(sets(found[:-1]), sets(in_one_call(model, tokens)[:-1]))


@pytest.mark.parametrize("recompute", ["off", "full"])
@pytest.mark.parametrize("family", ROUTED)
def test_training_computes_with_recorded_experts(family: str, recompute: str) -> None:
    """Other weights selected the recorded experts."""
    options: dict[str, Any] = {"architecture": ROUTED[family], "implementation": "hf"}
    trained = engine(**options, gradient_checkpointing=recompute, max_tokens_per_microbatch=64)
    model: Any = trained._shards.decoder
    lengths = [6, 9, 4]
    ids = torch.randint(4, 40, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    batch = SequenceSample.from_default(lengths, ["a", "b", "c"], {"input_ids": ids})
    texts = [tuple(part.tolist()) for part in ids.split(lengths)]
    plain = trained.forward(batch)["logp"]
    records = [in_one_call(model_of(family, seed=5), text).to(torch.int16) for text in texts]
    for record in records:
        record[-1] = -1
    own = [in_one_call(model, text) for text in texts]
    wanted = [torch.where(a < 0, b, a.long()) for a, b in zip(records, own, strict=True)]
    wanted[1] = own[1]
    add_experts(batch, [records[0].numpy(), records[1][:0].numpy(), records[2].numpy()])
    replayed = trained.forward(batch)["logp"]
    for place, length in enumerate(lengths):
        with chosen(model) as found:
            trained.forward(batch.take([place]))
        seen, recorded = torch.cat(found, dim=1)[:length], length if place == 1 else length - 1
        assert torch.equal(seen[:recorded], wanted[place][:recorded])
        assert (seen >= 0).all()
    assert (replayed - plain)[: lengths[0]].abs().max() > 1e-4
    assert (replayed - plain).split(lengths)[1].abs().max() < 1e-5

    def loss(outputs: dict[str, Tensor], _: SequenceSample) -> Any:
        return outputs["logp"].sum(), {}

    with chosen(model) as found:
        trained.train_batch(batch, loss, 1.0)
    layers = len(wanted[0][0]) // 2
    again = found[layers:][::-1]
    assert len(again) == (layers if recompute == "full" else 0)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=False))


def test_replay_of_the_routers_own_choice_changes_nothing() -> None:
    """The results have the same bits. Covers families that choose experts by scores, by logits and
    in groups.
    """
    for family in ROUTED:
        options: dict[str, Any] = {"architecture": ROUTED[family]}
        trained = engine(**options, implementation="hf")
        ids = torch.randint(4, 40, (30,), generator=torch.Generator().manual_seed(3))
        batch = SequenceSample.from_default([30], ["a"], {"input_ids": ids})
        plain = trained.forward(batch)["logp"]
        model: Any = trained._shards.decoder
        record = in_one_call(model, tuple(ids.tolist())).to(torch.int16)
        add_experts(batch, [record.numpy()])
        assert torch.equal(trained.forward(batch)["logp"], plain)


def test_recorded_experts_keep_their_weights_outside_of_the_chosen_groups() -> None:
    """DeepSeek-V2 sets the scores of other groups to zero before it chooses experts."""
    grouped = {"n_routed_experts": 8, "n_group": 4, "topk_group": 1}
    values = tiny("deepseek_v2", **CHANGES, **grouped, topk_method="group_limited_greedy")
    model = HFModel(HFConfig.from_hf(values), "lm", source=None, seed=0, dtype=torch.float32)
    gate = next(each for name, each in model.named_modules() if name.endswith("gate"))
    states = torch.randn(30, 32, generator=torch.Generator().manual_seed(3))
    scores = gate(states)[0].softmax(-1)
    replayed = Replayed(torch.tensor([[[1, 6]]]).expand(30, -1, -1))
    with model.routed(replayed):
        _, weights, experts = gate(states)
    assert torch.equal(weights, scores[:, [1, 6]] * gate.routed_scaling_factor)
    assert torch.equal(experts, torch.tensor([[1, 6]]).expand(30, -1))


@pytest.mark.parametrize("field", ["moe_intermediate_size", "intermediate_size"])
def test_experts_of_any_size_train(field: str) -> None:
    """torch's grouped products reject rows that are not a multiple of 16 bytes."""
    family = "gpt_oss" if field == "intermediate_size" else "qwen3_moe"
    values = tiny(family, **CHANGES, **{field: 6})
    trained = engine(architecture=values, implementation="hf")
    batch = SequenceSample.from_default([30], ["a"], {"input_ids": torch.arange(30)})

    def loss(outputs: dict[str, Tensor], _: SequenceSample) -> Any:
        return outputs["logp"].sum(), {}

    assert trained.train_batch(batch, loss, 1.0)["grad_norm"] > 0


def test_replay_is_rejected_for_models_without_known_routers() -> None:
    assert "no experts to replay" in refusal(HFConfig.from_hf(tiny("olmo2")))
    assert "cannot build a dbrx model" in refusal(HFConfig.from_hf({"model_type": "dbrx"}))
    assert refusal(HFConfig.from_hf(ROUTED["softmax"])) == ""
    assert "Llama4Router chooses cannot" in refusal(HFConfig.from_hf(tiny("llama4_text")))
    unknown = nn.ModuleDict({"block": nn.ModuleDict({"experts": nn.Linear(2, 2)})})
    with pytest.raises(UsageError, match="block has no router with top_k"):
        HFRouters(unknown)


def test_router_without_one_topk_is_rejected_when_it_is_called() -> None:
    model = model_of("softmax")
    router = next(each for name, each in model.named_modules() if name.endswith("gate"))
    compute = router.forward

    def twice(states: Tensor) -> Any:
        logits, weights, experts = compute(states)
        return logits, weights, experts.clone()

    router.forward = twice  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="does not return the indices of one topk"):
        asyncio.run(_served(model))


async def _served(model: HFModel) -> Any:
    return await HFRollout(model, "0.1", 16).submit(request(0, 4, RECORDING))
