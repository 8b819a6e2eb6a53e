"""Log-probabilities under the sampling masks that generation has recorded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.rollout_calls import add_experts, add_masks
from slurmrl.data.meta import SampledMasks
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import microbatch
from slurmrl.engines.base import ServingOptions
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.errors import UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, RolloutEngine
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from tests.support.generated import GenerationOutput, generated
from tests.unit.engines.test_engines_rollout_native import (
    TIGHT,
    decoder_of,
    prompts,
    request,
    served,
)
from tests.unit.engines.test_engines_waits import ARCHITECTURE, engine, sample

OPTIONS = GenerationOptions(
    max_new_tokens=12,
    min_new_tokens=3,
    temperature=0.7,
    top_k=6,
    top_p=0.9,
    stop_token_ids=(3, 4, 5, 6),
    masks=True,
)


def expected_mask(logits: Tensor, banned: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """Return the tokens that top-k and top-p keep, and their log-probabilities [V]."""
    scaled = logits / OPTIONS.temperature
    scaled[list(banned)] = -torch.inf
    assert OPTIONS.top_k is not None
    values, order = scaled.sort(descending=True)
    weights = values[: OPTIONS.top_k].softmax(-1)
    count = int((weights.cumsum(-1) - weights < OPTIONS.top_p).sum())
    kept = order[:count].sort().values
    logq = torch.full_like(scaled, -torch.inf)
    logq[kept] = scaled[kept].log_softmax(-1)
    return kept.tolist(), logq


def logits_of(decoder: Any, tokens: list[int]) -> Tensor:
    """Return the logits [T, V] after each token, from the model's features and its head."""
    cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        features = decoder(torch.tensor(tokens), cu_seqlens, len(tokens))
        logits: Tensor = features @ decoder.head_weight().T
        return logits


def check(decoder: Any, prompt: tuple[int, ...], made: Completion) -> None:
    assert made.masks is not None
    logits = logits_of(decoder, [*prompt, *made.tokens])
    rows = made.masks.cut([1] * len(made.tokens))
    for place, (token, masks) in enumerate(zip(made.tokens, rows, strict=True)):
        banned = OPTIONS.stop_token_ids if place < OPTIONS.min_new_tokens else ()
        kept, logq = expected_mask(logits[len(prompt) - 1 + place].clone(), banned)
        assert list(masks.ids) == kept
        assert token in kept
        assert abs(float(logq[token]) - made.logprobs[place]) < 1e-5


def test_requests_get_the_sampling_mask_of_each_token() -> None:
    """Some rows are preempted, and other requests need no mask or a larger mask."""
    decoder, texts = decoder_of(), prompts(9)
    others = GenerationOptions(max_new_tokens=9, temperature=0.5)
    wider = GenerationOptions(max_new_tokens=9, top_k=20, masks=True)
    asked = [request(i, text, OPTIONS, i, 50 + i) for i, text in enumerate(texts)]
    mixed = [request("plain", texts[0], others, 7), request("wider", texts[1], wider, 8)]
    found, _ = served(decoder, [*asked, *mixed], TIGHT)
    for place, made in enumerate(found[:-2]):
        check(decoder, texts[place // 2], made)
    plain, wide = found[-2:]
    assert plain.masks is None
    assert wide.masks is not None
    assert set(wide.masks.sizes) == {20}
    alone, _ = served(decoder, asked[:1])
    assert alone[0].tokens == found[0].tokens
    assert alone[0].masks == found[0].masks


def replayed(output: GenerationOutput) -> SequenceSample:
    """Generate two completions of each prompt."""
    rows = output.lengths.view(-1, 2).tolist()
    made = SequenceSample.grouped(
        rows, [str(n) for n in range(len(rows))], {"input_ids": output.tokens}
    )
    assert output.masks is not None
    add_masks(made, output.masks)
    return made


def drawn(output: GenerationOutput) -> Tensor:
    """Return which tokens [T] are sampled."""
    pairs = zip(output.prompt_lengths.tolist(), output.lengths.tolist(), strict=True)
    rows = [torch.arange(length) >= prompt for prompt, length in pairs]
    return torch.cat(rows)


@pytest.mark.parametrize("implementation", ["builtin", "hf"])
def test_training_computes_the_sampling_distribution_of_generation(implementation: str) -> None:
    """This holds for any micro-batches."""
    model = engine(implementation=implementation, max_tokens_per_microbatch=40)
    draws: dict[str, Any] = {"seed": 1, "step": 2, "keys": torch.arange(12)}
    output = generated(model, sample("prompt_ids"), OPTIONS, **draws)
    batch = replayed(output)
    new = drawn(output)
    found = model.forward(batch, temperature=0.7)["logp"]
    assert (found - output.logprobs)[new].abs().max() < 1e-5
    whole = model.forward(batch.only(["input_ids"]), temperature=0.7)["logp"]
    assert (found - whole)[new].min() > -1e-5
    assert (found - whole)[new].max() > 0.1  # a mask removes probability mass
    assert torch.equal(found[~new], whole[~new])


def test_completions_with_a_shared_prefix_keep_their_own_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal sequences are computed once, but a weight update may change their masks."""
    ids = torch.randint(4, 50, (24,), generator=torch.Generator().manual_seed(2))
    batch = SequenceSample.grouped([[24, 24]], ["a"], {"input_ids": ids.repeat(2)})
    masks = SampledMasks()
    for others in ((1, 2), (1, 2, 3)):
        masks.skip(20)
        for token in ids[20:].tolist():
            masks.add([*others, token])
    add_masks(batch, masks)
    model = engine()
    monkeypatch.setattr(FSDPEngine, "_may_share", property(lambda _: True))
    assert microbatch.shared_tokens(batch) is not None
    shared = model.forward(batch)["logp"]
    monkeypatch.setattr(FSDPEngine, "_may_share", property(lambda _: False))
    apart = model.forward(batch)["logp"]
    assert (shared - apart).abs().max() < 1e-5
    assert (apart[20:24] - apart[44:]).abs().min() > 1e-3


@pytest.mark.parametrize("implementation", ["builtin", "hf"])
def test_logprobs_use_the_sampling_mask_even_if_it_is_not_recorded(implementation: str) -> None:
    """``ServingOptions.masked=False`` selects the whole distribution instead."""
    model = engine(implementation=implementation)
    asked = request(5, prompts(1)[0], OPTIONS, 5)
    unrecorded = replace(asked, options=replace(asked.options, masks=False))

    def completion(wanted: GenerationRequest, *, masked: bool) -> Completion:
        async def run(served: RolloutEngine) -> Completion:
            return (await served.submit(wanted))[0]

        with model.serving("1.1", ServingOptions(masked=masked)) as served:
            assert served is not None
            return asyncio.run(run(served))

    recorded = completion(asked, masked=True)
    under = completion(unrecorded, masked=True)
    whole = completion(unrecorded, masked=False)
    assert recorded.tokens == under.tokens == whole.tokens
    assert under.logprobs == recorded.logprobs
    assert sum(whole.logprobs) < sum(under.logprobs) - 0.1


EXPERTS_OF_TWO = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "initializer_range": 0.2,
}


def choices(decoder: Any, tokens: list[int]) -> Tensor:
    """Return the experts [T, L * K] that the routers choose for each token by their logits."""
    rows: list[Tensor] = []
    count = decoder.config.moe.per_token

    def note(_: Any, __: Any, logits: Tensor) -> None:
        rows.append(logits.topk(count).indices)

    hooks = [block.gate.register_forward_hook(note) for block in decoder._sparse_blocks]
    logits_of(decoder, tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat(rows, -1)


@pytest.mark.parametrize("limits", [Limits(), TIGHT])
def test_requests_get_the_experts_that_processed_each_token(limits: Limits) -> None:
    """Also covers prompts that completions share, and preempted rows."""
    decoder, texts = decoder_of("mixtral-windows"), prompts(6)
    options = GenerationOptions(max_new_tokens=14, stop_token_ids=(3,), experts=True)
    asked = [request(i, text, options, 2 * i, 2 * i + 1) for i, text in enumerate(texts)]
    plain = replace(options, experts=False)
    found, _ = served(decoder, [*asked, request("p", texts[0], plain, 9)], limits)
    assert found.pop().experts is None
    for place, made in enumerate(found):
        tokens = [*texts[place // 2], *made.tokens]
        assert made.experts is not None
        assert made.experts[:-1].tolist() == choices(decoder, tokens)[:-1].tolist()
        assert (made.experts[-1] == -1).all()


def test_experts_are_recorded_from_the_first_request_that_needs_them() -> None:
    """Cached tokens of earlier requests are prefilled again."""
    decoder, text = decoder_of("mixtral-windows"), tuple(range(4, 24))
    plain = GenerationOptions(max_new_tokens=12)
    batch = ContinuousBatch(decoder, Limits(page_tokens=4), context=None)
    before = batch.add(request("before", text, plain, 1))
    for _ in range(4):
        batch.step()
    assert not batch._runner.records_experts
    asked = batch.add(request("asked", text, replace(plain, experts=True), 2))
    while batch.busy:
        batch.step()
    (first,), (second,) = before, asked
    ((alone,), _) = served(decoder, [request("before", text, plain, 1)])
    assert first.completion().tokens == alone.tokens
    made = second.completion()
    assert made.experts is not None
    assert made.experts[:-1].tolist() == choices(decoder, [*text, *made.tokens])[:-1].tolist()


def test_model_without_experts_records_none() -> None:
    with pytest.raises(UsageError, match="no experts to record"):
        served(decoder_of(), [request(0, (5,), replace(OPTIONS, experts=True), 1)])


def experts_engine(**settings: Any) -> FSDPEngine:
    return engine(architecture={**ARCHITECTURE, **EXPERTS_OF_TWO}, **settings)


def routed(seed: int = 4) -> SequenceSample:
    """A sample with arbitrary experts; one of its sequences has no record."""
    batch, generator = sample(), torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(batch.item_lengths("input_ids")):
        picks = [torch.randperm(6, generator=generator)[:2] for _ in range(2 * length)]
        rows.append(torch.cat(picks).to(torch.int16).numpy()[: 0 if number == 2 else None])
    add_experts(batch, rows)
    return batch


def test_whole_batches_replay_their_recorded_experts() -> None:
    model = experts_engine()
    options = GenerationOptions(max_new_tokens=9, temperature=0.7, experts=True)
    output = generated(model, sample("prompt_ids"), options, seed=1, step=2, keys=torch.arange(6))
    assert output.experts is not None
    rows = [[length] for length in output.lengths.tolist()]
    names = [str(n) for n in range(6)]
    batch = SequenceSample.grouped(rows, names, {"input_ids": output.tokens})
    own = model.forward(batch, temperature=0.7)["logp"]
    add_experts(batch, output.experts)
    found = model.forward(batch, temperature=0.7)["logp"]
    assert (found - own).abs().max() < 1e-6
    assert (found - output.logprobs)[drawn(output)].abs().max() < 1e-5
    others = [(rows + 1) % 6 for rows in output.experts]
    add_experts(batch, others)
    assert (model.forward(batch, temperature=0.7)["logp"] - own).abs().max() > 1e-3


def test_replayed_experts_match_tokens_in_micro_batches_and_recomputation() -> None:
    batch = routed()
    alone = [experts_engine().forward(batch.take([n]))["logp"] for n in range(batch.bs)]
    steps = []
    for mode, budget in (("off", 100), ("selective", 12), ("full", 30)):
        model = experts_engine(gradient_checkpointing=mode, max_tokens_per_microbatch=budget)
        assert (model.forward(batch)["logp"] - torch.cat(alone)).abs().max() < 1e-5
        steps.append(model.train_batch(batch, _sum_of_logprobs, 10.0))
    for step in steps:
        assert step["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=1e-5)
    free = experts_engine().train_batch(batch.only(["input_ids"]), _sum_of_logprobs, 10.0)
    assert abs(free["grad_norm"] / steps[0]["grad_norm"] - 1) > 1e-3
    unknown = experts_engine().forward(sample())["logp"].split(batch.item_lengths("input_ids"))
    assert (unknown[2] - alone[2]).abs().max() < 1e-6  # (without a record)
    assert (unknown[1] - alone[1]).abs().max() > 1e-3


def _sum_of_logprobs(outputs: dict[str, Tensor], _: SequenceSample) -> Any:
    return -outputs["logp"].sum(), {}


def test_experts_of_another_model_are_rejected() -> None:
    with pytest.raises(UsageError, match="do not fit a model with 0 expert layers"):
        engine().forward(routed())


def test_sampling_mask_without_top_k_bound_is_rejected() -> None:
    for options in ({"top_p": 0.5}, {}, {"top_k": 5, "greedy": True}):
        with pytest.raises(UsageError, match="sampling mask needs top_k"):
            GenerationOptions(max_new_tokens=1, masks=True, **options)
