"""A real server of the newest SGLang, which keeps its requests while its weights are replaced."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.server_client import ServerClient
from slurmrl.rollouts.generation.sglang import SglangServer
from tests.engines.conftest import (
    EXACT,
    PROMPT,
    Loop,
    check_stale_cache,
    logprobs,
    midway,
    over_an_update,
    request,
)
from tests.engines.served import Served, with_a_stale_cache

PYTHON = Path(os.environ.get("SGLANG_PYTHON", "")).parent.parent / "newest" / "bin" / "python"


@pytest.fixture(scope="module")
def server(
    loop: Loop, versions: dict[str, Path], tokenizer: PreTrainedTokenizerFast
) -> Iterator[Served]:
    if not PYTHON.is_file():
        pytest.skip("no second SGLang beside the first: run scripts/test-engines")
    with closing(Served(SglangServer, str(PYTHON), loop, versions, tokenizer)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of requested completions, and the modes of pauses."""
    sent: list[str] = []
    post = HttpClient.post

    async def record(
        self: HttpClient, path: str, body: Any = None, *, timeout_s: float | None
    ) -> object:
        if path in ("/generate", "/pause_generation"):
            sent.append(body.get("rid") or body["mode"])
        return await post(self, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(HttpClient, "post", record)
    return sent


def check_parts(versions: dict[str, Path], made: Completion) -> None:
    """Check that each version has sampled greedily from its own distributions, without cached
    results of another version.
    """
    switch = made.versions.index("2.1")
    assert made.versions == ("1.1",) * switch + ("2.1",) * (len(made.tokens) - switch)
    for version, part in (("1.1", slice(0, switch)), ("2.1", slice(switch, None))):
        values = logprobs(versions[version], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :].max(-1)
        assert values.indices.tolist()[part] == list(made.tokens[part])
        assert (values.values - torch.tensor(made.logprobs))[part].abs().max() < EXACT


def test_update_in_flight_keeps_the_requests_of_the_server(
    served: Served, asked: list[str]
) -> None:
    made, _ = served.loop.run(over_an_update(served.engine, served.versions))
    check_parts(served.versions, made)
    assert "abort" not in asked
    names = [each for each in asked if each != "retract"]
    assert len(names) == len(set(names)) < len(asked)


def test_sampling_masks_match_the_weights_that_sampled_each_token(served: Served) -> None:
    async def attempt(delay_s: float) -> list[Completion] | None:
        await served.engine.update_weights(served.version("1.1"))
        future = served.engine.submit(request(n=2, max_new_tokens=60, top_k=4, masks=True))
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        drawn = await future
        return list(drawn) if all(len(set(made.versions)) == 2 for made in drawn) else None

    for made in served.loop.run(midway(attempt)):
        tokens = torch.tensor(made.tokens)
        assert made.masks is not None
        masks = made.masks.cut([1] * len(tokens))
        for version in ("1.1", "2.1"):
            values = logprobs(served.versions[version], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
            best = values.topk(4)
            expected = values.gather(-1, tokens[:, None]) - best.values.logsumexp(-1, keepdim=True)
            for place, drew in enumerate(made.versions):
                if drew == version:
                    assert list(masks[place].ids) == sorted(best.indices[place].tolist())
                    assert abs(float(expected[place]) - made.logprobs[place]) < EXACT


def test_requests_of_a_twice_paused_server_end_like_unpaused_ones(
    served: Served,
) -> None:
    """An aborted request returns the tokens that the server still reports."""

    async def work() -> tuple[Completion, Completion]:
        engine = served.engine
        (whole,) = await engine.submit(request(max_new_tokens=80, greedy=True))

        async def attempt(delay_s: float) -> tuple[Completion, Completion] | None:
            ending = request(max_new_tokens=80, top_k=4, masks=True)
            kept = engine.submit(request(max_new_tokens=80, greedy=True))
            ended = engine.submit(ending)
            await asyncio.sleep(delay_s)
            await engine.pause()
            await engine.pause()
            late = kept.done() or ended.done()
            engine.abort(ending.request_id)
            (aborted,) = await ended
            await engine.update_weights(served.version("1.1"))
            late = late or kept.done()
            await engine.resume()
            (made,) = await kept
            return None if late else (made, aborted)

        made, aborted = await midway(attempt)
        assert made.tokens == whole.tokens
        assert made.logprobs == pytest.approx(whole.logprobs, abs=EXACT)
        return made, aborted

    _, aborted = served.loop.run(work())
    assert aborted.finish == "aborted"
    assert aborted.masks is not None
    assert len(aborted.tokens) == len(aborted.logprobs) == len(aborted.versions)


def test_requests_with_minimum_tokens_are_aborted_and_continued(
    served: Served, asked: list[str]
) -> None:
    """The server would count the minimum of a kept request from the update on."""

    async def attempt(delay_s: float) -> Completion | None:
        await served.engine.update_weights(served.version("1.1"))
        never = request(max_new_tokens=80, min_new_tokens=60, greedy=True)
        future = served.engine.submit(never)
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        (made,) = await future
        return made if len(set(made.versions)) == 2 else None

    check_parts(served.versions, served.loop.run(midway(attempt)))
    assert "abort" in asked


def test_server_left_paused_by_a_lost_client_serves_the_next_client(served: Served) -> None:
    """The server may still have requests of that client."""

    async def work() -> tuple[Completion, ...]:
        lost = await ServerClient.connect(served.dialect())
        await lost.update_weights(served.version("1.1"))
        futures = [lost.submit(request(n=4, max_new_tokens=200)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await lost.pause()
        await lost.close()
        await asyncio.gather(*futures, return_exceptions=True)
        engine = await ServerClient.connect(served.dialect())
        try:
            await engine.update_weights(served.version("2.1"))
            drawn = await engine.submit(request(n=2, greedy=True))
            await engine.update_weights(served.version("1.1"))
            return drawn
        finally:
            await engine.close()

    for made in served.loop.run(work()):
        assert set(made.versions) == {"2.1"}
        values = logprobs(served.versions["2.1"], [*PROMPT, *made.tokens])[len(PROMPT) - 1 :]
        assert values.argmax(-1).tolist() == list(made.tokens)


def test_stale_cache_requests_continue_with_keys_of_older_weights(
    served: Served,
) -> None:
    made, later = served.loop.run(with_a_stale_cache(served))
    check_stale_cache(served.versions, made, later)
