"""Whole batches by the native request engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import ServingOptions
from slurmrl.engines.hf_rollout import HFRollout
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.paged import PagedCache
from slurmrl.rollouts.generation.base import (
    Completion,
    GenerationOptions,
    GenerationRequest,
    RolloutEngine,
)
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from tests.support.generated import GenerationOutput, generate, generated
from tests.unit.engines.test_engines_rollout_native import letters
from tests.unit.engines.test_engines_waits import engine, sample
from tests.unit.models.conftest import BASE, ODD, random_decoder

STOP = 3
USUAL = Limits(rows=8, step_tokens=16)


def decoder_of(name: str = "qwen3") -> Decoder:
    return random_decoder(ModelConfig.from_hf({**BASE, **ODD[name]}), 0)


def prompts(count: int, longest: int = 20) -> tuple[Tensor, Tensor]:
    """Packed token ids and their boundaries."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest + 1, (count,), generator=draw)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return torch.randint(4, 37, (int(lengths.sum()),), generator=draw), ends


def by_requests(
    decoder: Decoder,
    options: GenerationOptions,
    keys: Tensor,
    count: int = 12,
    limits: Limits = USUAL,
) -> GenerationOutput:
    draws: dict[str, Any] = {"seed": 1, "step": 2, "keys": keys}
    return generate(decoder, *prompts(count), options, limits=limits, **draws)


def assert_same(found: GenerationOutput, wanted: GenerationOutput) -> None:
    """The same completions, with log-probabilities that differ by rounding at most."""
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.lengths, wanted.lengths)
    assert torch.equal(found.prompt_lengths, wanted.prompt_lengths)
    assert torch.equal(found.finished, wanted.finished)
    assert found.logprobs.dtype == wanted.logprobs.dtype
    assert (found.logprobs - wanted.logprobs).abs().max() < 1e-5


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {"stop_token_ids": (STOP, 11), "min_new_tokens": 3, "temperature": 0.7},
        {"top_k": 5, "top_p": 0.8, "stop_token_ids": tuple(range(3, 12))},
        {"greedy": True},
        {"max_new_tokens": 1},
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen2-windows", "mixtral-windows", "gpt2"])
def test_completions_do_not_depend_on_the_limits(
    name: str, changes: dict[str, Any], n: int
) -> None:
    """With more sequences than rows, and prompts longer than a call."""
    decoder, keys = decoder_of(name), torch.arange(12 * n) * 7919 - 40
    options = GenerationOptions(**{"max_new_tokens": 20, **changes})
    ample = Limits(rows=64, step_tokens=1024)
    wanted = by_requests(decoder, options, keys, limits=ample)
    assert_same(by_requests(decoder, options, keys), wanted)


def test_the_same_call_gives_the_same_bits() -> None:
    """Also after other calls, since nothing of theirs is kept."""
    decoder, keys = decoder_of(), torch.arange(36)
    options = GenerationOptions(max_new_tokens=15, stop_token_ids=(STOP,))
    first = by_requests(decoder, options, keys)
    by_requests(decoder, GenerationOptions(max_new_tokens=9), torch.arange(5), 5)
    again = by_requests(decoder, options, keys)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)


def test_ended_sequences_leave_their_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is that of the rows that are served at a time, and of no prompt that has ended."""
    sizes: list[int] = []
    grow = PagedCache.grow

    def recorded(self: PagedCache, pages: int) -> None:
        grow(self, pages)
        sizes.append(self.pages * self.page)

    monkeypatch.setattr(PagedCache, "grow", recorded)
    limits = Limits(rows=4, step_tokens=64, page_tokens=4)
    options = GenerationOptions(max_new_tokens=20)
    output = by_requests(decoder_of(), options, torch.arange(60), 60, limits)
    growth_and_page_ends = 1.5 * 4 * (20 + 20 + 4)
    assert sizes[-1] <= growth_and_page_ends < int(output.lengths.sum()) / 5


def test_the_memory_of_the_cache_is_free_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: on a GPU, training needs it before the garbage collector runs."""
    caches: list[weakref.ref[PagedCache]] = []
    grow = PagedCache.grow

    def recorded(self: PagedCache, pages: int) -> None:
        grow(self, pages)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(PagedCache, "grow", recorded)
    gc.disable()
    try:
        by_requests(decoder_of(), GenerationOptions(max_new_tokens=5), torch.arange(12))
        assert caches
        assert not any(cache() for cache in caches)
    finally:
        gc.enable()


def test_arguments_are_checked_before_anything_is_computed() -> None:
    decoder, options = decoder_of("gpt2"), GenerationOptions(max_new_tokens=8)
    draws: dict[str, Any] = {"seed": 0, "step": 0, "limits": USUAL}
    none, ids = torch.zeros(0, dtype=torch.int64), torch.arange(4, 14)
    output = generate(decoder, none, torch.zeros(1, dtype=torch.int32), options, keys=none, **draws)
    assert output.tokens.shape == output.lengths.shape == output.logprobs.shape == (0,)

    def refused(ends: list[int], options: GenerationOptions, message: str) -> None:
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        keys = torch.arange(len(ends) - 1)
        with pytest.raises(UsageError, match=message):
            generate(decoder, ids, cu_seqlens, options, keys=keys, **draws)

    refused([0, 4, 4, 10], options, "empty prompt")
    refused([0, 10], GenerationOptions(max_new_tokens=55), r"of 65 tokens .* for 64")
    strings = GenerationOptions(max_new_tokens=8, stop_strings=("x",))
    refused([0, 10], strings, "has stop strings, but the engine has no tokenizer")


def test_stop_strings_end_completions_of_a_whole_batch() -> None:
    """Wherever in tokens they are; and requests of single completions get the same bits."""
    model, batch = engine(), sample("prompt_ids")
    keys = torch.arange(4 * len(batch.ids))
    options = GenerationOptions(max_new_tokens=30, stop_strings=("ab", "cccd", "hhij", "ff"))
    draws: dict[str, Any] = {"seed": 1, "step": 1, "keys": keys}
    free = generated(model, batch, GenerationOptions(max_new_tokens=30), **draws)
    found = generated(model, batch, options, **draws, decode=letters)
    drawn, whole = new_tokens(found), new_tokens(free)
    stopped = [first_stop(tokens.tolist(), options.stop_strings) for tokens in whole]
    assert 5 < sum(map(bool, stopped)) < len(stopped)
    for tokens, all_tokens, wanted in zip(drawn, whole, stopped, strict=True):
        assert torch.equal(tokens, all_tokens[:wanted])
    assert found.finished.tolist() == list(map(bool, stopped))

    with model.serving("1.0", ServingOptions(rows=8, decode=letters)) as served:
        assert served is not None
        answers = asyncio.run(answered(served, batch, options, keys))
    assert [answer.tokens for answer in answers] == [tuple(each.tolist()) for each in drawn]
    assert [answer.finish == "stop" for answer in answers] == found.finished.tolist()
    logprobs = torch.tensor([value for answer in answers for value in answer.logprobs])
    assert torch.equal(logprobs, found.logprobs[found.logprobs != 0])


def test_requests_of_a_round_have_their_own_limits() -> None:
    """The last turns of episodes have fewer tokens left, perhaps fewer than the least number."""
    model, batch = engine(implementation="hf"), sample("prompt_ids")
    stops = tuple(range(3, 20))
    limits = [
        GenerationOptions(max_new_tokens=most, min_new_tokens=min(4, most), stop_token_ids=stops)
        for most in islice(cycle((2, 9, 4, 1, 3)), len(batch.cu_seqlens("prompt_ids")) - 1)
    ]
    requests = requests_of(batch, limits, range(len(limits)))

    def asked(*requests: GenerationRequest) -> list[Completion]:
        async def run() -> list[tuple[Completion, ...]]:
            assert served is not None
            return await asyncio.gather(*map(served.submit, requests))

        with model.serving("1.0", ServingOptions()) as served:
            return [made for (made,) in asyncio.run(run())]

    alone = [made for request in requests for made in asked(request)]
    together = asked(*requests)
    assert [(each.tokens, each.finish) for each in together] == [
        (each.tokens, each.finish) for each in alone
    ]
    assert {each.finish for each in together} == {"stop", "length"}


@pytest.mark.parametrize("rows", [2, 256])
def test_requests_with_different_options_are_sampled_in_separate_rounds(
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
    compute = HFRollout._round

    def counted(self: HFRollout, requests: Sequence[GenerationRequest]) -> Any:
        sizes.append(sum(len(request.keys) for request in requests))
        return compute(self, requests)

    async def run(served: RolloutEngine, *requests: GenerationRequest) -> list[list[Any]]:
        answers = await asyncio.gather(*map(served.submit, requests))
        return [[(each.tokens, each.finish) for each in answer] for answer in answers]

    with model.serving("1.0", ServingOptions(rows=rows)) as served:
        assert served is not None
        alone = [asyncio.run(run(served, each))[0] for each in requests]
        monkeypatch.setattr(HFRollout, "_round", counted)
        assert asyncio.run(run(served, *requests)) == alone
    assert sum(sizes) == 3 * len(requests)
    assert sorted(sizes) == ([1, 1, 1, 2, 2, 2, 2, 2, 2] if rows == 2 else [3, 3, 3, 6])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": ("x",)}, "has stop strings, which models of transformers cannot find"),
        ({"experts": True}, "asks for experts, which models of transformers do not record"),
    ],
)
def test_request_of_a_transformers_model_is_refused_with_options_that_it_lacks(
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


def first_stop(tokens: list[int], stops: tuple[str, ...]) -> int | None:
    """The tokens up to the one that completes the first stop string."""
    texts = ((count, letters(tokens[:count])) for count in range(1, len(tokens) + 1))
    return next((count for count, text in texts if any(stop in text for stop in stops)), None)


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


async def answered(
    served: RolloutEngine, batch: SequenceSample, options: GenerationOptions, keys: Tensor
) -> list[Completion]:
    """Each completion by a request of its own."""
    requests = requests_of(batch, [options] * len(keys), keys.tolist())
    futures = map(served.submit, requests)
    return [completion for (completion,) in await asyncio.gather(*futures)]


@pytest.mark.parametrize("closed", [False, True])
def test_a_transformers_model_that_failed_or_was_closed_serves_no_more(
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
            monkeypatch.setattr(served, "_round", fail)
            with pytest.raises(RunFailedError, match="no memory"):
                await served.submit(request)
        with pytest.raises(RunFailedError):
            await served.health()
        with pytest.raises(RunFailedError):
            await served.submit(replace(request, request_id="later"))

    with model.serving("1.0", ServingOptions()) as served:
        assert served is not None
        asyncio.run(run(served))
