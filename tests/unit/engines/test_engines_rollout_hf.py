"""Requests to an engine that trains, with models of transformers and the built-in decoder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import ServingOptions
from slurmrl.engines.hf_batch import CHECK_TOKENS, HFBatch
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, RolloutEngine
from tests.support.generated import GenerationOutput, generated
from tests.unit.engines.test_engines_rollout_native import letters
from tests.unit.engines.test_engines_waits import engine, sample


@pytest.mark.parametrize(
    ("implementation", "every"), [("builtin", 1), ("hf", 1), ("hf", 8), ("hf", 50)]
)
@pytest.mark.parametrize("least", [0, 7])
def test_stop_strings_end_completions_of_a_whole_batch(
    implementation: str, every: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, some additional tokens are sampled before the host reads them."""
    monkeypatch.setitem(CHECK_TOKENS, "cpu", every)
    model, batch = engine(implementation=implementation), sample("prompt_ids")
    keys = torch.arange(4 * len(batch.ids))
    free = GenerationOptions(max_new_tokens=30, min_new_tokens=least, stop_token_ids=(5,))
    options = replace(free, stop_strings=("ab", "cccd", "hhij", "ff", "m"))
    draws: dict[str, Any] = {"seed": 1, "step": 1, "keys": keys}
    whole = generated(model, batch, free, **draws)
    found = generated(model, batch, options, **draws, decode=letters)
    stopped = [
        first_stop(tokens.tolist(), options.stop_strings, least) for tokens in new_tokens(whole)
    ]
    assert 5 < sum(map(bool, stopped)) < len(stopped)
    pairs = zip(new_tokens(found), new_tokens(whole), stopped, strict=True)
    for tokens, all_tokens, wanted in pairs:
        assert torch.equal(tokens, all_tokens[:wanted])
    assert found.finished.tolist() == [
        bool(stop) or ended for stop, ended in zip(stopped, whole.finished.tolist(), strict=True)
    ]


@pytest.mark.parametrize("rows", [2, 256])
def test_completion_does_not_depend_on_options_of_other_requests(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """A request with more keys than rows is divided, and its completions keep their order."""
    model, batch = engine(implementation="hf"), sample("prompt_ids")
    stops = tuple(range(3, 20))
    options = [
        GenerationOptions(max_new_tokens=most, min_new_tokens=least, stop_token_ids=stops)
        for most, least in ((9, 4), (9, 3), (5, 5), (2, 2))
    ]
    options.append(replace(options[0], temperature=0.5))
    one, *_ = requests_of(batch, options[:1] * batch.bs, range(batch.bs))
    requests = [
        replace(one, request_id=str(number), options=each, keys=(3, 1, 2))
        for number, each in enumerate(options)
    ]
    sizes: list[int] = []
    join = HFBatch._join

    def counted(self: HFBatch, rows: Sequence[Any]) -> None:
        sizes.append(len(rows))
        join(self, rows)

    async def run(served: RolloutEngine, *requests: GenerationRequest) -> list[list[Any]]:
        answers = await asyncio.gather(*map(served.submit, requests))
        return [[(each.tokens, each.finish) for each in answer] for answer in answers]

    with model.serving("1.0", ServingOptions(rows=rows)) as served:
        assert served is not None
        alone = [asyncio.run(run(served, each))[0] for each in requests]
        monkeypatch.setattr(HFBatch, "_join", counted)
        assert asyncio.run(run(served, *requests)) == alone
    assert sum(sizes) == 3 * len(requests)
    assert sizes == ([2] * 7 + [1] if rows == 2 else [15])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": ("x",)}, "has stop strings, but the engine has no tokenizer"),
        ({"experts": True}, "the model has no experts to record"),
    ],
)
def test_unsupported_options_are_rejected_for_transformers_models(
    options: dict[str, Any], message: str
) -> None:
    wanted = GenerationOptions(max_new_tokens=3, **options)
    batch = sample("prompt_ids")
    with pytest.raises(UsageError, match=message):
        generated(
            engine(implementation="hf"),
            batch,
            wanted,
            seed=0,
            step=0,
            keys=torch.arange(len(batch.ids)),
        )


def new_tokens(output: GenerationOutput) -> list[Tensor]:
    whole = output.tokens.tensor_split(output.lengths.cumsum(0)[:-1])
    begins = output.prompt_lengths.tolist()
    return [tokens[begin:] for tokens, begin in zip(whole, begins, strict=True)]


def first_stop(tokens: list[int], stops: tuple[str, ...], least: int) -> int | None:
    """Return the number of tokens up to the first token after ``least`` that completes a stop."""
    for count in range(least + 1, len(tokens) + 1):
        known, text = len(letters(tokens[: count - 1])), letters(tokens[:count])
        if any(stop in text[max(0, known - len(stop) + 1) :] for stop in stops):
            return count
    return None


def requests_of(
    batch: SequenceSample, options: Sequence[GenerationOptions], keys: Sequence[int]
) -> list[GenerationRequest]:
    """A request for each completion."""
    parts = batch.tensor("prompt_ids").tensor_split(batch.cu_seqlens("prompt_ids")[1:-1].long())
    each = len(keys) // len(parts)
    return [
        GenerationRequest(
            request_id=str(number),
            prompt=tuple(parts[number // each].tolist()),
            keys=(key,),
            seed=1,
            step=1,
            options=own,
        )
        for number, (key, own) in enumerate(zip(keys, options, strict=True))
    ]


@pytest.mark.parametrize("closed", [False, True])
def test_failed_or_closed_transformers_model_rejects_requests(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    model, batch = engine(implementation="hf"), sample("prompt_ids")
    options = [GenerationOptions(max_new_tokens=3)] * batch.bs
    request, *_ = requests_of(batch, options, range(batch.bs))

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    async def run(served: RolloutEngine) -> None:
        if closed:
            await served.close()
        else:
            monkeypatch.setattr(HFBatch, "step", fail)
            with pytest.raises(RunFailedError, match="no memory"):
                await served.submit(request)
        with pytest.raises(RunFailedError):
            await served.health()
        with pytest.raises(RunFailedError):
            await served.submit(replace(request, request_id="later"))

    with model.serving("1.0", ServingOptions()) as served:
        assert served is not None
        asyncio.run(run(served))
