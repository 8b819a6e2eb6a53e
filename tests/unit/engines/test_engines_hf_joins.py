"""Requests that join a batch of a model of transformers, and weights that change during it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.engines.hf_batch import CHECK_TOKENS, HFRollout
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, WeightVersion
from tests.support.families import tiny

CHANGES = {"vocab_size": 40, "max_position_embeddings": 128}
FAMILIES = {
    "keys and values of all tokens": "olmo2",
    "a window": "gemma3_text",
    "states": "qwen3_5_text",
    "latent keys": "deepseek_v3",
}
ENDS = GenerationOptions(max_new_tokens=14, min_new_tokens=2, stop_token_ids=(3, 4, 5, 6))


def model_of(name: str, seed: int = 0) -> HFModel:
    config = HFConfig.from_hf(tiny(FAMILIES[name], **CHANGES))
    return HFModel(config, "lm", source=None, seed=seed, dtype=torch.float32)


def request(
    name: int, length: int, options: GenerationOptions = ENDS, keys: tuple[int, ...] = (1, 2)
) -> GenerationRequest:
    generator = torch.Generator().manual_seed(name)
    prompt = tuple(torch.randint(7, 40, (length,), generator=generator).tolist())
    own = tuple(10 * name + key for key in keys)
    return GenerationRequest(
        request_id=str(name), prompt=prompt, keys=own, seed=1, step=2, options=options
    )


def alone(model: HFModel, asked: GenerationRequest, version: str = "0.1") -> list[Completion]:
    async def run() -> tuple[Completion, ...]:
        return await HFRollout(model, version, 64).submit(asked)

    return list(asyncio.run(run()))


def assert_alike(found: Completion, wanted: Completion) -> None:
    assert (found.tokens, found.finish) == (wanted.tokens, wanted.finish)
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_joining_requests_have_the_completions_of_separate_requests(
    family: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECK_TOKENS, "cpu", every)
    model = model_of(family)
    long = GenerationOptions(max_new_tokens=60)
    asked = [request(0, 6, long, keys=(1,)), *(request(n, 3 + n % 4) for n in range(1, 7))]
    asked += [request(7, 40), *(request(n, 2) for n in range(8, 12))]
    widths: list[int] = []
    session = HFModel.session

    def recorded(self: HFModel, lengths: Any, tokens: int, width: int, **more: Any) -> Any:
        widths.append(width)
        return session(self, lengths, tokens, width, **more)

    monkeypatch.setattr(HFModel, "session", recorded)

    async def run() -> list[tuple[Completion, ...]]:
        engine = HFRollout(model, "0.1", 64, rows=6, joins=True)
        futures = []
        for each in asked:
            futures.append(engine.submit(each))
            await steps(3)
        return await asyncio.gather(*futures)

    together = asyncio.run(run())
    assert sum(width > 0 for width in widths) >= 3, "prompts joined"
    assert sum(width == 0 for width in widths) >= 2, "the batch was read again"
    for each, found in zip(asked, together, strict=True):
        for one, wanted in zip(found, alone(model, each), strict=True):
            assert_alike(one, wanted)


@pytest.mark.parametrize("every", [1, 4])
def test_cache_is_recomputed_before_padding_exceeds_its_columns(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 scales queries by the column 40 on; no sequence here has so many tokens."""
    monkeypatch.setitem(CHECK_TOKENS, "cpu", every)
    scaled = {"attn_temperature_tuning": True, "floor_scale": 40, "attn_scale": 2.0}
    no_rope = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 0]}
    config = HFConfig.from_hf(tiny("llama4_text", **CHANGES, **scaled, **no_rope))
    model = HFModel(config, "lm", source=None, seed=0, dtype=torch.float32)
    short, long = GenerationOptions(max_new_tokens=6), GenerationOptions(max_new_tokens=34)
    asked = [request(0, 20, short), request(1, 4, long), request(2, 5, long)]

    async def run() -> list[tuple[Completion, ...]]:
        engine = HFRollout(model, "0.1", 64, joins=True)
        futures = []
        for each in asked:
            futures.append(engine.submit(each))
            await steps(3)
        return await asyncio.gather(*futures)

    for each, found in zip(asked, asyncio.run(run()), strict=True):
        for one, wanted in zip(found, alone(model, each), strict=True):
            assert_alike(one, wanted)


def test_requests_wait_for_the_end_of_a_round_if_joins_are_off() -> None:
    model = model_of("a window")

    async def run() -> list[bool]:
        engine = HFRollout(model, "0.1", 64)
        first = engine.submit(request(0, 5, GenerationOptions(max_new_tokens=30)))
        await steps(4)
        later = engine.submit(request(1, 5, GenerationOptions(max_new_tokens=1)))
        await first
        begun = later.done()
        await later
        return [begun]

    assert asyncio.run(run()) == [False]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_after_an_update_come_from_the_new_weights(family: str, tmp_path: Path) -> None:
    """Completions continue over their earlier tokens, and each token has its version."""
    first, second = model_of(family), model_of(family, seed=1)
    write(second, tmp_path)
    options = GenerationOptions(max_new_tokens=20)

    async def run() -> list[Completion]:
        engine = HFRollout(first, None, 64, joins=True)
        futures = [engine.submit(request(n, 4 + n, options)) for n in range(3)]
        await steps(3)
        assert engine.version is None
        await engine.update_weights(WeightVersion(name="0.1"))
        await steps(6)
        await engine.update_weights(WeightVersion(name="1.1", folder=tmp_path))
        assert engine.version == "1.1"
        return [one for made in await asyncio.gather(*futures) for one in made]

    found = asyncio.run(run())
    for place, one in enumerate(found):
        old = one.versions.count("0.1")
        assert 0 < old < 20
        assert one.versions == ("0.1",) * old + ("1.1",) * (20 - old)
        begun = request(place // 2, 4 + place // 2, options)
        again = GenerationRequest(
            request_id="again",
            prompt=(*begun.prompt, *one.tokens[:old]),
            keys=(begun.keys[place % 2],),
            seed=1,
            step=2,
            options=GenerationOptions(max_new_tokens=20 - old),
        )
        (wanted,) = alone(second, again)
        assert one.tokens[old:] == wanted.tokens
        assert one.logprobs[old:] == pytest.approx(wanted.logprobs, abs=1e-4)


def test_stale_cache_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of older weights stays, and each token has its version."""
    model, reads = model_of("states"), []
    session = HFModel.session

    def recorded(self: HFModel, lengths: Any, *more: Any, **options: Any) -> Any:
        reads.append(list(lengths))
        return session(self, lengths, *more, **options)

    monkeypatch.setattr(HFModel, "session", recorded)

    async def run(stale: bool) -> Completion:
        engine = HFRollout(model, "0.1", 64, joins=True, stale_cache=stale)
        future = engine.submit(request(0, 5, GenerationOptions(max_new_tokens=9), keys=(1,)))
        await steps(4)
        await engine.update_weights(WeightVersion(name="1.1"))
        return (await future)[0]

    for stale, wanted in ((True, 1), (False, 2)):
        reads.clear()
        made = asyncio.run(run(stale))
        assert set(made.versions) == {"0.1", "1.1"}
        assert len(reads) == wanted


def test_aborted_requests_keep_their_tokens_and_free_their_rows() -> None:
    model = model_of("states")
    endless = GenerationOptions(max_new_tokens=100)

    async def run() -> tuple[Completion, Completion, Completion]:
        engine = HFRollout(model, "0.1", 64, rows=1, joins=True)
        begun = engine.submit(request(0, 5, endless, keys=(1,)))
        cancelled = engine.submit(request(1, 5, endless, keys=(1,)))
        waiting = engine.submit(request(2, 5, endless, keys=(1,)))
        last = engine.submit(request(3, 5, ENDS, keys=(1,)))
        await steps(5)
        cancelled.cancel()
        engine.abort("2")
        engine.abort("0")
        return (await begun)[0], (await waiting)[0], (await last)[0]

    begun, waiting, last = asyncio.run(run())
    (wanted,) = alone(model, request(0, 5, endless, keys=(1,)))
    count = len(begun.tokens)
    assert begun.finish == waiting.finish == "aborted"
    assert 0 < count < 100
    assert begun.tokens == wanted.tokens[:count]
    assert waiting.tokens == ()
    assert_alike(last, alone(model, request(3, 5, ENDS, keys=(1,)))[0])


def test_no_token_is_sampled_while_paused() -> None:
    model = model_of("a window")

    async def run() -> tuple[int, int]:
        engine = HFRollout(model, "0.1", 64, joins=True)
        future = engine.submit(request(0, 5, keys=(1,)))
        await steps(3)
        await engine.pause()
        rows = engine._jobs["0"].sequences
        before = len(rows[0].logprobs)
        await steps(20)
        after = len(rows[0].logprobs)
        await engine.resume()
        await future
        return before, after

    before, after = asyncio.run(run())
    assert before == after > 0


def test_weights_of_another_model_are_rejected_without_a_change(tmp_path: Path) -> None:
    model = model_of("states")
    write(model_of("a window"), tmp_path)
    before = {name: values.clone() for name, values in model.state_dict().items()}

    async def run() -> tuple[Completion, ...]:
        engine = HFRollout(model, "0.1", 64, joins=True)
        with pytest.raises(UsageError, match="contains another model"):
            await engine.update_weights(WeightVersion(name="1.1", folder=tmp_path))
        return await engine.submit(request(0, 5))

    assert {one.versions[0] for one in asyncio.run(run())} == {"0.1"}
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


def test_damaged_weights_end_the_engine(tmp_path: Path) -> None:
    model = model_of("states")
    write(model, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])

    async def run() -> None:
        engine = HFRollout(model, "0.1", 64, joins=True)
        future = engine.submit(request(0, 5, GenerationOptions(max_new_tokens=90)))
        with pytest.raises(RunFailedError, match="could not be read"):
            await engine.update_weights(WeightVersion(name="1.1", folder=tmp_path))
        with pytest.raises(RunFailedError):
            await future
        with pytest.raises(RunFailedError):
            await engine.health()

    asyncio.run(run())


def test_too_long_request_does_not_fail_other_requests() -> None:
    model = model_of("keys and values of all tokens")
    model._made = HFConfig.from_hf(tiny("gpt2"))

    async def run() -> None:
        engine = HFRollout(model, "0.1", 64, joins=True)
        good = engine.submit(request(0, 5))
        with pytest.raises(UsageError, match="too long"):
            await engine.submit(request(1, 60))
        assert len(await good) == 2

    asyncio.run(run())


def write(model: HFModel, folder: Path) -> None:
    """Write the weights as transformers does."""
    model.inner.save_pretrained(folder)
