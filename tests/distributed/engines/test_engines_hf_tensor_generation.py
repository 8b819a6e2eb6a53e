"""Generation by models of transformers that tensor ranks share."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.engines import hf_batch
from slurmrl.engines.base import ServingOptions
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, RolloutEngine
from tests.distributed.engines.cases import Setup, batch, make, prompts
from tests.distributed.engines.test_engines_hf_tensor import ALONE, setup
from tests.pool import RankError, RankPool
from tests.support.generated import generated, letters, request

HERE = "tests.distributed.engines.test_engines_hf_tensor_generation"
SAMPLED = GenerationOptions(max_new_tokens=8, stop_token_ids=(3, 4), temperature=0.8)
GREEDY = replace(SAMPLED, greedy=True)


def whole_batch(setup: Setup, options: GenerationOptions) -> tuple[list[int], list[float]]:
    """Three completions of each prompt of this data-parallel rank.

    All ranks have the same prompts.
    """
    engine: Any = make(setup)
    sample = prompts(batch())
    out = generated(engine, sample, options, seed=3, step=0, keys=torch.arange(30))
    return out.tokens.tolist(), out.logprobs.tolist()


@pytest.mark.parametrize("options", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    ("family", "sizes", "engine"),
    [
        ("llama", {"dp": 1, "tp": 2}, "fsdp"),
        ("gemma3_text", {"dp": 2, "tp": 2}, "fsdp"),
        ("qwen3", {"dp": 1, "tp": 2}, "native"),
        ("gpt_oss", {"dp": 1, "tp": 2}, "fsdp"),
        ("qwen3_5_moe_text", {"dp": 1, "tp": 2}, "fsdp"),
    ],
)
def test_tensor_ranks_generate_the_same_tokens_as_one_rank(
    ranks: RankPool, family: str, sizes: dict[str, int], engine: str, options: GenerationOptions
) -> None:
    """All ranks have the same bits.

    The cache of a rank holds only the keys and values of its heads.
    """
    one, split = setup(family, ALONE), setup(family, sizes)
    if engine == "native":
        split = replace(split, engine=engine, trained=False)
    ((tokens, logprobs),) = ranks(1, f"{HERE}:whole_batch", one, options)
    found = ranks(2 * sizes["dp"], f"{HERE}:whole_batch", split, options)
    assert all(each == found[0] for each in found)
    assert found[0][0] == tokens
    assert found[0][1] == pytest.approx(logprobs, abs=1e-5)


async def everything(engine: RolloutEngine) -> dict[str, tuple[Completion, ...]]:
    """Serve requests with all options, which start and end at different times."""
    futures = {
        one.request_id: engine.submit(one)
        for one in (
            request("group", 11, 1, 2, 3),
            request("greedy", 6, 5, greedy=True, first=9),
            request("stops", 5, 6, 7, stop_token_ids=(11, 12, 13), min_new_tokens=3),
            request("strings", 5, 8, stop_strings=("aab", "ccc", "ff")),
            request("top", 12, 9, top_k=5, top_p=0.9, first=3, masks=True),
            request("aborted", 8, 10, 11, max_new_tokens=30),
        )
    }
    await futures["greedy"]
    engine.abort("aborted")
    first = await asyncio.gather(*futures.values())
    found = dict(zip(futures, first, strict=True))
    (turn,) = found["greedy"]
    later = request("turn", 6, 20, first=9)
    later = replace(later, prompt=(*later.prompt, *turn.tokens, 7))
    long = [request(f"long {n}", 30, 30 + n, max_new_tokens=4, first=n) for n in range(12)]
    answers = await asyncio.gather(*map(engine.submit, (later, *long)))
    return found | {one.request_id: a for one, a in zip((later, *long), answers, strict=True)}


def served(setup: Setup) -> dict[str, tuple[Completion, ...]] | None:
    """Return the leader's answers to the same requests twice, so that the ranks serve two
    rounds.
    """
    engine: Any = make(setup)
    results = []
    for _ in range(2):
        with engine.serving("0.1", ServingOptions(rows=6, decode=letters)) as rollout:
            results.append(None if rollout is None else asyncio.run(everything(rollout)))
        dist.barrier()
    assert tokens_of(results[0]) == tokens_of(results[1])
    return results[1]


def tokens_of(answers: dict[str, tuple[Completion, ...]] | None) -> Any:
    made = (answers or {}).items()
    return {name: [(each.tokens, each.finish) for each in answer] for name, answer in made}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tensor_ranks_serve_requests_of_their_leader(ranks: RankPool, family: str) -> None:
    (alone,) = ranks(1, f"{HERE}:served", setup(family, ALONE))
    leader, other = ranks(2, f"{HERE}:served", setup(family, {"dp": 1, "tp": 2}))
    assert other is None
    assert tokens_of(leader) == tokens_of(alone)
    for name, answer in alone.items():
        for made, wanted in zip(leader[name], answer, strict=True):
            assert made.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert made.masks == wanted.masks


def disagreeing(setup: Setup) -> None:
    """Generate a batch in which the second rank samples another token at one position."""
    engine: Any = make(setup)
    sample, calls = hf_batch.sample, count()

    def other_token(*args: Any, **options: Any) -> Any:
        drawn = sample(*args, **options)
        if dist.get_rank() == 1 and next(calls) == 2:
            drawn.tokens[0] = (drawn.tokens[0] + 1) % 33
        return drawn

    hf_batch.sample = other_token  # type: ignore[assignment]
    try:
        whole = prompts(batch())
        generated(engine, whole, SAMPLED, seed=3, step=0, keys=torch.arange(30))
    finally:
        hf_batch.sample = sample


def test_tensor_ranks_end_if_they_sample_different_tokens(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, f"{HERE}:disagreeing", setup("llama", {"dp": 1, "tp": 2}))
    message = "RunFailedError: rank 1 of a split model has sampled other tokens"
    assert str(caught.value).count(message) == 2
