"""The native engine: continuous batching over a paged cache."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.paged import PagedCache, PagedCall, PagedDecoder, cell_bytes
from slurmrl.models.parallel.split import WHOLE
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, WeightVersion
from slurmrl.rollouts.generation.native import native_rollout as rollout_module
from slurmrl.rollouts.generation.native.batch import bounded
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.rollouts.generation.native.sequence import ends_with_stop
from slurmrl.tensors.ops.logprobs import packed_logprobs_and_entropy
from tests.support.decoder_folders import from_hf, to_hf
from tests.support.generated import letters
from tests.unit.models.conftest import BASE, ODD, hf_model, random_decoder

STOP = 3
SMALL = Limits(rows=5, step_tokens=7)
TIGHT = Limits(rows=8, step_tokens=16, cache_tokens=48, page_tokens=4)
"""A cache for about one sequence in the longest case, so that rows are preempted."""


def decoder_of(name: str = "qwen3", seed: int = 0, **changes: Any) -> Decoder:
    return random_decoder(ModelConfig.from_hf({**BASE, **ODD[name], **changes}), seed)


def prompts(count: int, longest: int = 9) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(4, 37, (n,), generator=generator).tolist()) for n in lengths]


def request(
    name: object, prompt: tuple[int, ...], options: GenerationOptions, *keys: int, **more: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt=prompt, keys=keys, seed=1, step=2, options=options, **more
    )


def served(
    decoder: Decoder,
    requests: list[GenerationRequest],
    limits: Limits | None = None,
    *,
    overlap: bool = False,
    **more: Any,
) -> tuple[list[Completion], NativeRollout]:
    """Return all completions in the order of the requests, and the closed engine."""

    async def run() -> tuple[list[Completion], NativeRollout]:
        engine = NativeRollout(decoder, limits=limits, version="0.1", **more)
        engine._batch._overlap = overlap
        results = await asyncio.wait_for(asyncio.gather(*map(engine.submit, requests)), 120)
        return [completion for result in results for completion in result], engine

    return asyncio.run(run())


def everything_is_free(engine: NativeRollout) -> bool:
    pool = engine._batch._pool
    return len(pool._free) + len(pool._idle) == pool.made and not any(pool._users)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the numbers of tokens per sequence in each later call of a decoder."""
    counts: list[int] = []
    read = PagedDecoder.logits

    def counted(
        self: PagedDecoder, ids: Tensor, positions: Tensor, call: PagedCall, last: Tensor
    ) -> Tensor:
        counts.append(int((call.slots != self.cache.spare).sum()))
        return read(self, ids, positions, call, last)

    monkeypatch.setattr(PagedDecoder, "logits", counted)
    return counts


@pytest.mark.parametrize(
    ("limits", "overlap"), [(Limits(), True), (SMALL, False), (TIGHT, False), (TIGHT, True)]
)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"min_new_tokens": 2, "temperature": 0.8, "stop_token_ids": (STOP, 11)}),
        ("qwen2-windows", {"top_k": 5, "top_p": 0.8, "stop_token_ids": tuple(range(3, 12))}),
        ("mixtral-windows", {"greedy": True}),
        ("gpt2", {"max_new_tokens": 1}),
        ("gpt2", {"min_new_tokens": 3, "stop_token_ids": (STOP, 11)}),
    ],
)
def test_completions_do_not_depend_on_the_batch(
    name: str, changes: dict[str, Any], limits: Limits, overlap: bool
) -> None:
    """Completions equal those of a fixed batch, for any number of rows, tokens and pages."""
    decoder = decoder_of(name)
    options = GenerationOptions(**{"max_new_tokens": 25, **changes})
    requests = [
        request(i, text, options, *range(3 * i, 3 * i + 3)) for i, text in enumerate(prompts(12))
    ]
    wanted, _ = served(decoder, requests, Limits(rows=64, step_tokens=1024))
    found, engine = served(decoder, requests, limits, overlap=overlap)
    for own, completion in zip(wanted, found, strict=True):
        assert (completion.tokens, completion.finish) == (own.tokens, own.finish)
        difference = torch.tensor(own.logprobs) - torch.tensor(completion.logprobs)
        assert difference.abs().max() < 1e-5
        assert completion.versions == ("0.1",) * len(completion.tokens)
    assert everything_is_free(engine)


def test_request_survives_a_round_trip_through_json() -> None:
    """The leader of a split model sends requests as JSON to the other ranks."""
    options = GenerationOptions(max_new_tokens=3, stop_token_ids=(7,), stop_strings=("x",))
    sent = request("a", (3, 5), options, -1, 2)
    assert GenerationRequest.from_values(json.loads(json.dumps(asdict(sent)))) == sent


def test_memory_of_ended_sequences_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training needs the cache's memory before the garbage collector runs."""
    sizes: list[int] = []
    caches: list[weakref.ref[PagedCache]] = []
    grow = PagedCache.grow

    def recorded(self: PagedCache, pages: int) -> None:
        grow(self, pages)
        sizes.append(self.pages * self.page)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(PagedCache, "grow", recorded)
    options = GenerationOptions(max_new_tokens=20)
    requests = [request(i, text, options, i) for i, text in enumerate(prompts(60, 20))]
    limits = Limits(rows=4, step_tokens=64, page_tokens=4)
    gc.disable()
    try:
        found = served(decoder_of(), requests, limits, own=False, turns=False)[0]
        assert caches
        assert not any(cache() for cache in caches)
    finally:
        gc.enable()
    drawn = sum(
        len(each.prompt) + len(made.tokens) for each, made in zip(requests, found, strict=True)
    )
    growth_and_page_ends = 1.5 * 4 * (20 + 20 + 4)
    assert sizes[-1] <= growth_and_page_ends < drawn / 5


def test_turns_share_only_computed_cache_cells() -> None:
    """A call is dropped whose tokens would have filled pages."""
    decoder = decoder_of()
    limits = Limits(rows=4, step_tokens=16, cache_tokens=24, page_tokens=4)
    texts, four = [(5, 6, 7, 8), (9, 8, 7, 6)], GenerationOptions(max_new_tokens=4)
    free, _ = served(decoder, [request(i, text, four, 2 + i) for i, text in enumerate(texts)])
    last = tuple(each.tokens[3] for each in free)
    assert not any(token in last for each in free for token in each.tokens[:3])
    short = GenerationOptions(max_new_tokens=9, stop_token_ids=last)
    first = [request(i, text, short, 2 + i) for i, text in enumerate(texts)]
    more = request("c", (5,) * 5, GenerationOptions(max_new_tokens=9), 2)

    async def run() -> tuple[GenerationRequest, Completion]:
        engine = NativeRollout(decoder, limits=limits, version="0.1")
        engine._batch._overlap = True
        futures = [engine.submit(each) for each in (*first, more)]
        (_,), (ended,), _ = await asyncio.gather(*futures)
        assert len(ended.tokens) == 4
        turn = (*texts[1], *ended.tokens, 5)
        again = request("d", turn, GenerationOptions(max_new_tokens=2), 3)
        return again, (await engine.submit(again))[0]

    again, found = asyncio.run(run())
    (wanted,), _ = served(decoder, [again])
    assert found.tokens == wanted.tokens
    assert torch.tensor(found.logprobs).allclose(torch.tensor(wanted.logprobs), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ODD if name != "llama-dynamic-rope"])
def test_logprobs_equal_the_training_forward_pass(name: str) -> None:
    """Also covers preempted rows and chunked prompts."""
    decoder = decoder_of(name)
    options = GenerationOptions(max_new_tokens=30, temperature=0.8, stop_token_ids=(STOP, 11))
    texts = prompts(8, 20)
    requests = [request(i, text, options, i, 100 + i) for i, text in enumerate(texts)]
    limits = Limits(rows=8, step_tokens=10, cache_tokens=80, page_tokens=4)
    found, _ = served(decoder, requests, limits)
    sequences = [texts[place // 2] + completion.tokens for place, completion in enumerate(found)]
    cu = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    with torch.no_grad():
        hidden = decoder(flat, cu, max(map(len, sequences)))
        logp, _ = packed_logprobs_and_entropy(hidden, decoder.head_weight(), flat, cu, 0.8)
    for part, completion in zip(logp.split(cu.diff().tolist()), found, strict=True):
        new = part[-len(completion.tokens) :]
        assert (new - torch.tensor(completion.logprobs)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3", "mistral", "gemma", "mixtral", "qwen3_moe", "glm4_moe"),
        *("glm4_moe-groups", "deepseek_v3", "deepseek_v3-plain-queries", "gpt2"),
        *("deepseek_v2", "glm4_moe_lite"),
        *("gpt_oss", "gpt_oss-other"),
    ],
)
def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    """Tokens may differ only if two tokens are nearly equally likely."""
    from tests.support.decoder_folders import from_hf

    model = hf_model(ODD[name], 0)
    model.save_pretrained(tmp_path)
    options = GenerationOptions(max_new_tokens=12, greedy=True, stop_token_ids=(STOP,))
    texts = prompts(10)
    requests = [request(i, text, options, i) for i, text in enumerate(texts)]
    found, _ = served(from_hf(tmp_path), requests, SMALL)
    compared = 0
    for text, completion in zip(texts, found, strict=True):
        result = model.generate(
            torch.tensor([text]),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = result.sequences[0, len(text) :].tolist()
        for place, logits in enumerate(result.logits):
            top = logits[0].topk(2).values
            if top[0] - top[1] <= 1e-4:
                break
            token = completion.tokens[place]
            assert token == expected[place]
            logprob = logits[0].log_softmax(-1)[token].item()
            assert abs(logprob - completion.logprobs[place]) < 1e-4
            compared += 1
    assert compared > 40


def test_logprobs_belong_to_the_sampling_distribution() -> None:
    """With top-k and top-p, the probabilities of the kept tokens sum to 1."""
    options = GenerationOptions(max_new_tokens=1, top_k=2)
    found, _ = served(decoder_of(), [request(0, (5, 6, 7), options, *range(64))])
    probability = {c.tokens[0]: torch.tensor(c.logprobs[0]).exp().item() for c in found}
    assert len(probability) == 2
    assert sum(probability.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("length", [8, 16, 17, 31])
def test_prompt_is_prefilled_once_for_all_its_completions(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests that begin with the same pages reuse it."""
    decoder, prompt = decoder_of(), tuple(4 + n % 30 for n in range(length))
    counts = reads(monkeypatch)
    options = GenerationOptions(max_new_tokens=3)
    found, engine = served(decoder, [request(0, prompt, options, *range(64))])
    assert len(found) == 64
    assert len({completion.tokens for completion in found}) > 10
    assert counts == [length, 64, 64]
    assert everything_is_free(engine)


def test_later_turns_prefill_only_tokens_after_the_shared_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=9)
    counts = reads(monkeypatch)

    async def run() -> list[int]:
        engine = NativeRollout(decoder, version="0.1", limits=Limits(page_tokens=4))
        prompt: tuple[int, ...] = tuple(range(4, 14))
        prefills = []
        for turn in range(4):
            if turn == 3:
                await engine.update_weights(WeightVersion(name="1.1"))
            counts.clear()
            (completion,) = await engine.submit(request(turn, prompt, options, turn))
            prefills.append(counts[0])
            prompt += (*completion.tokens, 20, 21)
        return prefills

    # 10 tokens, then 11 more each turn; full pages of the tokens read before are shared.
    assert asyncio.run(run()) == [10, 21 - 16, 32 - 28, 43]


def test_simultaneous_equal_prompts_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=2)
    counts = reads(monkeypatch)
    prompt = tuple(4 + n % 30 for n in range(33))
    requests = [request(i, prompt, options, i) for i in range(10)]
    served(decoder, requests, Limits(page_tokens=8))
    assert counts[0] == 33 + 9 * 1


def test_new_weights_take_over_within_a_completion(tmp_path: Path) -> None:
    """Each token has its version. The decoder's own tensors change."""
    first, second = decoder_of(seed=0), decoder_of(seed=1)
    to_hf(second, tmp_path)
    options = GenerationOptions(max_new_tokens=20)
    texts = prompts(6)

    async def run() -> list[Completion]:
        engine = NativeRollout(first, version="0.1", limits=SMALL)
        futures = [engine.submit(request(i, text, options, i)) for i, text in enumerate(texts)]
        for _ in range(8):
            await asyncio.sleep(0)
        await engine.update_weights(WeightVersion(name="1.1", folder=tmp_path))
        assert engine.version == "1.1"
        return [(await future)[0] for future in futures]

    found = asyncio.run(run())
    mixed = 0
    for place, (text, completion) in enumerate(zip(texts, found, strict=True)):
        old = completion.versions.count("0.1")
        assert completion.versions == ("0.1",) * old + ("1.1",) * (20 - old)
        mixed += 0 < old < 20
        rest = GenerationOptions(max_new_tokens=20 - old)
        again = request(0, text + completion.tokens[:old], rest, place)
        (wanted,), _ = served(decoder_of(seed=1), [again])
        assert completion.tokens[old:] == wanted.tokens
        difference = torch.tensor(completion.logprobs[old:]) - torch.tensor(wanted.logprobs)
        assert difference.abs().max() < 1e-5
    assert mixed >= 4


@pytest.mark.parametrize("length", [2, 9])
def test_stale_cache_keeps_older_keys_after_an_update(tmp_path: Path, length: int) -> None:
    """The reference with transformers does the same."""
    models = [hf_model(ODD["qwen3"], seed) for seed in (1, 2)]
    old, new = (tmp_path / name for name in ("old", "new"))
    for model, folder in zip(models, (old, new), strict=True):
        model.save_pretrained(folder)
    prompt = tuple(range(4, 4 + length))
    options = GenerationOptions(max_new_tokens=24, greedy=True)

    async def run() -> list[Completion]:
        limits = Limits(page_tokens=4)
        engine = NativeRollout(from_hf(old), version="0.1", limits=limits, stale_cache=True)
        future = engine.submit(request("first", prompt, options, 0))
        while engine._batch.sampled < 2:
            await asyncio.sleep(0)
        assert (engine._batch.read < limits.page_tokens) == (length == 2)
        await engine.update_weights(WeightVersion(name="1.1", folder=new))
        (first,) = await future
        (later,) = await engine.submit(request("later", (*prompt, *first.tokens), options, 0))
        return [first, later]

    first, later = asyncio.run(run())
    switch = first.versions.index("1.1")
    assert first.versions == ("0.1",) * switch + ("1.1",) * (24 - switch)
    tokens = torch.tensor([[*prompt, *first.tokens]])
    cached = length + switch - 1  # the newest token is read with the next one
    with torch.no_grad():
        whole = models[0](tokens[:, :cached], use_cache=True)
        behind = models[1](tokens[:, cached:-1], past_key_values=whole.past_key_values)
        logits = torch.cat([whole.logits, behind.logits], dim=1)[0, length - 1 :]
        anew = models[1](tokens).logits[0, length - 1 : -1]
        last = models[1](torch.tensor([[*prompt, *first.tokens, *later.tokens]])).logits
    check_greedy(first, logits)
    drawn = torch.tensor(first.logprobs)[switch:]
    assert (anew.log_softmax(-1).max(-1).values[switch:] - drawn).abs().max() > 0.01
    check_greedy(later, last[0, length + 24 - 1 : -1])


def test_stale_cache_pages_are_not_shared_with_later_prompts(tmp_path: Path) -> None:
    """Also covers prompts of which only a part was prefilled before the update."""
    models = [hf_model(ODD["qwen3"], seed) for seed in (1, 2)]
    old, new = (tmp_path / name for name in ("old", "new"))
    for model, folder in zip(models, (old, new), strict=True):
        model.save_pretrained(folder)
    prompt = tuple(range(4, 13))
    options = GenerationOptions(max_new_tokens=24, greedy=True)

    async def run() -> tuple[tuple[int, ...], Completion]:
        limits = Limits(rows=4, step_tokens=6, page_tokens=16)
        engine = NativeRollout(from_hf(old), version="0.1", limits=limits, stale_cache=True)
        other = engine.submit(request("other", (1, 2, 3), options, 0))
        while engine._batch.sampled < 3:
            await asyncio.sleep(0)
        future = engine.submit(request("first", prompt, options, 0, 1))
        read = engine._batch.read
        while engine._batch.read == read:
            await asyncio.sleep(0)
        assert engine._batch.read < read + len(prompt)
        await engine.update_weights(WeightVersion(name="1.1", folder=new))
        text = (*prompt, *(await future)[1].tokens)
        await other
        (later,) = await engine.submit(request("later", text, options, 7))
        return text, later

    text, later = asyncio.run(run())
    with torch.no_grad():
        logits = models[1](torch.tensor([[*text, *later.tokens]])).logits
    check_greedy(later, logits[0, len(text) - 1 : -1])


def check_greedy(completion: Completion, logits: Tensor) -> None:
    found = logits.log_softmax(-1).max(-1)
    assert found.indices.tolist() == list(completion.tokens)
    assert (found.values - torch.tensor(completion.logprobs)).abs().max() < 1e-4


@pytest.mark.parametrize("paused", [False, True])
def test_updates_at_every_step_do_not_stop_requests(paused: bool) -> None:
    """Each version samples at least one token, even if prompts exceed a call's limit."""
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=6)
    texts = [tuple(4 + (n + i) % 30 for n in range(30)) for i in range(4)]

    async def run() -> tuple[list[Completion], int]:
        engine = NativeRollout(decoder, version="0.1", limits=Limits(rows=4, step_tokens=4))
        futures = [engine.submit(request(i, text, options, i)) for i, text in enumerate(texts)]
        updates = 0
        while not all(future.done() for future in futures):
            updates += 1
            assert updates < 100
            if paused:
                await engine.pause()
            await engine.update_weights(WeightVersion(name=f"{updates}.1"))
            if paused:
                await engine.resume()
        return [future.result()[0] for future in futures], updates

    found, updates = asyncio.run(asyncio.wait_for(run(), 60))
    assert updates > 6
    assert {len(completion.tokens) for completion in found} == {6}
    assert len({version for completion in found for version in completion.versions}) > 6


def test_update_does_not_wait_for_an_ended_request() -> None:
    """The update waits for a token of the previous version. The last request ends without one."""

    async def run() -> None:
        engine = NativeRollout(decoder_of(), version="0.1", limits=Limits(rows=4, step_tokens=4))
        options = GenerationOptions(max_new_tokens=6)
        future = engine.submit(request(0, (5,) * 30, options, 0))
        await asyncio.sleep(0)
        update = asyncio.create_task(engine.update_weights(WeightVersion(name="1.1")))
        await asyncio.sleep(0)
        assert not update.done()
        engine.abort("0")
        assert (await future)[0].tokens == ()
        await asyncio.wait_for(update, 30)
        assert engine.version == "1.1"
        assert len((await engine.submit(request(1, (5, 6), options, 1)))[0].tokens) == 6

    asyncio.run(run())


def test_no_token_is_sampled_while_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=10)

    async def run() -> Completion:
        engine = NativeRollout(decoder, version="0.1")
        future = engine.submit(request(0, (5, 6), options, 0))
        await asyncio.sleep(0)
        await engine.pause()
        counts = reads(monkeypatch)
        late = engine.submit(request(1, (5, 6, 7), options, 1))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not counts
        assert not future.done()
        await engine.resume()
        await late
        return (await future)[0]

    (wanted,), _ = served(decoder, [request(0, (5, 6), options, 0)])
    assert asyncio.run(run()).tokens == wanted.tokens


def test_aborted_requests_keep_their_tokens() -> None:
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=40)

    async def run() -> tuple[Completion, ...]:
        engine = NativeRollout(decoder, version="0.1", limits=Limits(rows=2, step_tokens=8))
        futures = [
            engine.submit(request(i, text, options, i, 50 + i, 80 + i))
            for i, text in enumerate(prompts(3))
        ]
        for _ in range(6):
            await asyncio.sleep(0)
        engine.abort("0")
        engine.abort("no such request")
        futures[1].cancel()
        found = await futures[0]
        engine.abort("0")
        await futures[2]
        assert everything_is_free(engine)
        return found

    found = asyncio.run(run())
    assert [completion.finish for completion in found] == ["aborted"] * 3
    assert len(found[0].tokens) in range(1, 8)
    (wanted,), _ = served(decoder, [request(0, prompts(3)[0], options, 0)])
    assert wanted.tokens[: len(found[0].tokens)] == found[0].tokens


def test_requests_wait_for_weights_and_start_by_priority() -> None:
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=3)

    async def run() -> list[str]:
        engine = NativeRollout(decoder, limits=Limits(rows=1, step_tokens=8))
        assert engine.version is None
        order: list[str] = []
        futures = []
        for name, priority in (("b", 1), ("c", 2), ("a", 0)):
            future = engine.submit(request(name, (5, 6), options, 0, priority=priority))
            future.add_done_callback(lambda _, name=name: order.append(name))
            futures.append(future)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(future.done() for future in futures)
        await engine.update_weights(WeightVersion(name="0.1"))
        await asyncio.gather(*futures)
        return order

    assert asyncio.run(run()) == ["a", "b", "c"]


def test_thousand_simultaneous_requests_are_served() -> None:
    """Each request has its own random stream, in a bounded batch."""
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=2, stop_token_ids=(STOP,))
    texts = prompts(40)
    requests = [request(i, texts[i % 40], options, i) for i in range(1000)]
    found, engine = served(decoder, requests, Limits(cache_tokens=1024))
    assert len(found) == 1000
    assert engine._batch._pool.made * 16 <= 1024
    alone, _ = served(decoder, requests[990:])
    assert [completion.tokens for completion in alone] == [
        completion.tokens for completion in found[990:]
    ]


@pytest.mark.parametrize(
    ("prompt", "limits", "more", "message"),
    [
        ((), None, {}, "an empty prompt"),
        ((5, 37), None, {}, "token 37 is not in the vocabulary of 37"),
        ((-1, 5), None, {}, "token -1 is not in the vocabulary of 37"),
        ((5,) * 64, None, {}, "64 tokens leaves no room .* context of 64"),
        ((5,) * 70, None, {}, "70 tokens leaves no room"),
        ((5,) * 30, Limits(cache_tokens=32), {}, "30 tokens with up to 10 new tokens does not fit"),
        ((5,), None, {"stop_strings": ("x",)}, "no tokenizer"),
    ],
)
def test_requests_that_can_never_be_served_are_rejected(
    prompt: tuple[int, ...], limits: Limits | None, more: dict[str, Any], message: str
) -> None:
    decoder = decoder_of()
    options = GenerationOptions(max_new_tokens=10)

    async def run() -> None:
        engine = NativeRollout(decoder, version="0.1", limits=limits)
        wrong = GenerationOptions(max_new_tokens=10, **more)
        bad = engine.submit(request(0, prompt, wrong, 0))
        good = engine.submit(request(1, (5, 6), options, 0))
        with pytest.raises(UsageError, match=message):
            await bad
        assert len((await good)[0].tokens) == 10

    asyncio.run(run())


def test_sequence_ends_at_the_context_length() -> None:
    options = GenerationOptions(max_new_tokens=10)
    (completion,), _ = served(decoder_of(), [request(0, (5,) * 60, options, 0)])
    assert (len(completion.tokens), completion.finish) == (4, "length")


def test_diverged_model_fails_all_requests() -> None:
    decoder = decoder_of()
    with torch.no_grad():
        decoder.head_weight().fill_(float("nan"))

    async def run() -> None:
        engine = NativeRollout(decoder, version="0.1")
        await engine.health()
        options = GenerationOptions(max_new_tokens=4)
        futures = [engine.submit(request(i, (5, 6), options, i)) for i in range(3)]
        checks: list[Awaitable[Any]] = [*futures, engine.submit(request(9, (5,), options, 1))]
        for check in checks:
            with pytest.raises(RunFailedError, match="not finite"):
                await check
        with pytest.raises(RunFailedError, match="not finite"):
            await engine.health()

    asyncio.run(run())


def test_partially_read_weights_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, other = decoder_of(), tmp_path / "other"
    to_hf(decoder_of(seed=1), tmp_path)
    other.mkdir()
    to_hf(decoder_of(num_hidden_layers=1), other)
    options = GenerationOptions(max_new_tokens=3)

    def broken(*_: object) -> None:
        raise OSError("stale file handle")

    async def run() -> None:
        engine = NativeRollout(decoder, version="0.1")
        with pytest.raises(UsageError, match="layers"):
            await engine.update_weights(WeightVersion(name="1.1", folder=other))
        assert engine.version == "0.1"
        await engine.submit(request(0, (5, 6), options, 0))
        monkeypatch.setattr(rollout_module, "read_weights", broken)
        with pytest.raises(RunFailedError, match=r"weights 2.1 .* stale file handle"):
            await engine.update_weights(WeightVersion(name="2.1", folder=tmp_path))
        with pytest.raises(RunFailedError, match="stale"):
            await engine.submit(request(1, (5, 6), options, 0))

    asyncio.run(run())


def test_closed_engine_fails_its_requests() -> None:
    async def run() -> None:
        engine = NativeRollout(decoder_of(), version="0.1")
        future = engine.submit(request(0, (5, 6), GenerationOptions(max_new_tokens=40), 0))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(RunFailedError, match="closed"):
            await future

    asyncio.run(run())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least", [0, 5])
def test_stop_strings_end_completions_across_tokens(least: int, overlap: bool) -> None:
    """A stop string may begin and end inside tokens."""
    decoder, stops = decoder_of(), ("ab", "cccd", "hhij", "ff")
    free = GenerationOptions(max_new_tokens=40)
    options = GenerationOptions(max_new_tokens=40, min_new_tokens=least, stop_strings=stops)
    texts = prompts(20)
    whole, _ = served(decoder, [request(i, text, free, i) for i, text in enumerate(texts)])
    found, engine = served(
        decoder,
        [request(i, text, options, i) for i, text in enumerate(texts)],
        overlap=overlap,
        decode=letters,
    )
    assert everything_is_free(engine)
    stopped = 0
    for unbounded, completion in zip(whole, found, strict=True):
        tokens, count = unbounded.tokens, len(completion.tokens)
        assert tokens[:count] == completion.tokens

        def ends(at: int, tokens: tuple[int, ...] = tokens) -> bool:
            text, before = letters(tokens[:at]), len(letters(tokens[: at - 1]))
            return any(
                text.endswith(stop, 0, end)
                for stop in stops
                for end in range(before + 1, len(text) + 1)
            )

        wanted = [at for at in range(least + 1, 41) if ends(at)]
        assert count == (wanted[0] if wanted else 40)
        assert completion.finish == ("stop" if wanted else "length")
        stopped += bool(wanted)
    assert stopped > 5


def test_stop_string_may_overlap_an_earlier_stop_string_before_min_tokens() -> None:
    """Also covers characters of which each token has only a part."""
    assert ends_with_stop("".join, ["x", "a", "a", "a"], ("aa",))
    assert not ends_with_stop("".join, ["a", "a", "x"], ("aa",))

    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    text = "é\nöö\n\n".encode()
    found = [
        at for at in range(1, len(text) + 1) if ends_with_stop(decode, text[:at], ("ö", "\n\n"))
    ]
    assert found == [5, 7, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Limits(rows=0),
        lambda: Limits(rows=8, step_tokens=7),
        lambda: Limits(cache_tokens=8, page_tokens=16),
        lambda: Limits(cache_tokens=64, cache_bytes=2**20),
    ],
)
def test_native_engine_rejects_invalid_limits(wrong: Callable[[], Limits]) -> None:
    with pytest.raises(UsageError, match=r"must be at least|not both"):
        wrong()


def test_cache_stays_within_its_bytes() -> None:
    """This holds even with preempted rows. Completions stay the same."""
    decoder, options = decoder_of(), GenerationOptions(max_new_tokens=20, stop_token_ids=(STOP,))
    requests = [request(i, text, options, i, 50 + i) for i, text in enumerate(prompts(8))]
    wanted, _ = served(decoder, requests)
    size = 10 * 4 * cell_bytes(decoder) + 7
    limits = Limits(rows=8, step_tokens=16, page_tokens=4, cache_bytes=size)
    found, engine = served(decoder, requests, limits)
    assert [completion.tokens for completion in found] == [each.tokens for each in wanted]
    layers = engine._batch._runner._decoder.cache.layers
    held = sum(slab.numel() * slab.element_size() for both in layers for slab in both)
    assert size - 4 * cell_bytes(decoder) < held <= size


def test_gpu_cache_leaves_memory_for_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Any = SimpleNamespace(
        config=decoder_of().config,
        split=WHOLE,
        head_weight=lambda: SimpleNamespace(device=torch.device("cuda", 1), element_size=lambda: 2),
    )
    cell = cell_bytes(decoder)
    free = {torch.device("cuda", 1): 702 * cell}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500 * cell)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200 * cell)
    assert bounded(Limits(), decoder) == Limits(cache_tokens=800)
    assert bounded(Limits(cache_bytes=65 * cell), decoder) == Limits(cache_tokens=64)
    assert bounded(Limits(cache_tokens=48), decoder) == Limits(cache_tokens=48)
    free[torch.device("cuda", 1)] = -290 * cell
    with pytest.raises(UsageError, match=r"page of 16 tokens .* free memory of cuda:1"):
        bounded(Limits(), decoder)
