"""Host waits for a GPU are few per training step and group of tokens, and none per micro-batch,
layer or token.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from slurmrl.config.schema import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import hf_batch as hf_module
from slurmrl.engines.base import ServingOptions
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.models import inference as inference_module
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from tests.support.generated import generated
from tests.support.host_waits import host_waits
from tests.unit.algorithms.conftest import alone

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
LENGTHS = [5, 9, 3, 9, 12, 7]
MOST_OF_A_STEP = 2
"""Waits for one optimizer step: for its statistics, and for the norm of its gradients."""


def engine(head: Any = "lm", **settings: Any) -> FSDPEngine:
    return FSDPEngine(
        "actor",
        Model(**{"architecture": ARCHITECTURE, "optimizer": {"lr": 1e-3}, **settings}),
        head=head,
        trained=True,
        context=alone("actor"),
        seed=3,
        total_steps=10,
        source=None,
    )


def sample(key: str = "input_ids") -> SequenceSample:
    ids = torch.randint(4, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return SequenceSample.from_default(LENGTHS, list(map(str, range(len(LENGTHS)))), {key: ids})


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("budget", [100, 12])
def test_host_does_not_wait_between_micro_batches_and_layers(
    head: str, mode: str, budget: int
) -> None:
    model, batch = (
        engine(head, gradient_checkpointing=mode, max_tokens_per_microbatch=budget),
        sample(),
    )

    def loss(outputs: dict[str, torch.Tensor], _: SequenceSample) -> Any:
        total = torch.stack([values.sum() for values in outputs.values()]).sum()
        return total, {"total": total.detach()}

    held = [*model._state().values(), batch.tensor("input_ids")]
    with host_waits(held) as waits:
        model.train_batch(batch, loss, 10.0)
    assert len(waits) <= MOST_OF_A_STEP, waits
    with host_waits(held) as waits:
        model.forward(batch)
    assert not waits


@pytest.mark.parametrize("stops", [(), tuple(range(10, 30))])
def test_rounds_check_for_ended_sequences_every_few_tokens(
    stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hf_module.CHECK_TOKENS, "cpu", 8)
    model, batch = engine(implementation="hf"), sample("prompt_ids")
    options = GenerationOptions(
        max_new_tokens=36, min_new_tokens=20, top_k=20, top_p=0.9, stop_token_ids=stops
    )
    keys, held = torch.arange(len(LENGTHS)), [*model._state().values()]
    check, waited = hf_module.HFBatch._check, []

    def counted(self: Any) -> Any:
        waited.append(len(waits))
        return check(self)

    monkeypatch.setattr(hf_module.HFBatch, "_check", counted)
    with host_waits(held) as waits:
        output = generated(model, batch, options, seed=1, step=1, keys=keys)
    tokens = int((output.lengths - output.prompt_lengths).max())
    assert bool(output.finished.any()) == bool(stops)
    assert len(waited) == -(-tokens // 8)
    assert {after - before for before, after in pairwise(waited)} == {1}, waits


def test_requests_wait_only_for_tokens_of_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens are read while the next call runs."""
    monkeypatch.setattr(inference_module, "packable", lambda weight: False)
    model, batch, keys = engine(), sample("prompt_ids"), torch.arange(len(LENGTHS))
    options = GenerationOptions(max_new_tokens=12, top_k=20, stop_token_ids=(10, 11))
    output = generated(model, batch, options, seed=1, step=1, keys=keys)
    texts = batch.tensor("prompt_ids").split(LENGTHS)

    async def served() -> list[tuple[int, ...]]:
        with model.serving("1.0", ServingOptions()) as rollout:
            rollout._batch._overlap = True
            requests = [
                GenerationRequest(
                    request_id=str(place),
                    prompt=tuple(text.tolist()),
                    keys=(place,),
                    seed=1,
                    step=1,
                    options=options,
                )
                for place, text in enumerate(texts)
            ]
            with host_waits(model._state().values()) as waits:
                found = await asyncio.gather(*map(rollout.submit, requests))
            assert len(set(waits)) == 1, "only Drawn.read waits, for a call that has ended"
            return [completion.tokens for (completion,) in found]

    parts = output.tokens.split(output.lengths.tolist())
    assert asyncio.run(served()) == [
        tuple(part[length:].tolist()) for part, length in zip(parts, LENGTHS, strict=True)
    ]


def test_sharded_modules_get_no_plain_host_tensor() -> None:
    """FSDP would copy it to the GPU, where indices cannot be made without waiting."""
    model, batch = engine(max_tokens_per_microbatch=12), sample()
    passed: list[Any] = []
    model._shards.decoder.register_forward_pre_hook(lambda _, found: passed.extend(found))
    model.forward(batch)
    tensors = [argument for argument in passed if isinstance(argument, torch.Tensor)]
    assert sum(map(len, tensors)) == sum(LENGTHS)
