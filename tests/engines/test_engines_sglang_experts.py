"""A real SGLang server on a CPU reports the experts of a small Qwen 3 mixture of experts, and the
actor trains with these experts.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slurmrl.algorithms.rollout_calls import add_experts
from slurmrl.config.schema.roles import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.tensors.parallel.groups import ParallelContext
from slurmrl.tensors.parallel.topology import ProcessTopology
from tests.engines.conftest import (
    EXACT,
    PROMPT,
    SIZES,
    Loop,
    midway,
    request,
    save_versions,
)
from tests.engines.served import Served
from tests.support.servers import check_served
from tests.support.trials import Site, sft_config

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no SGLang: run scripts/test-engines")
EXPERTS = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

TIGHT = (
    *("--max-total-tokens", "400", "--chunked-prefill-size", "32"),
    *("--schedule-conservativeness", "0.1"),
)
"""A cache that is too small for the requests that the server begins, and prompts that are read in
parts."""
STEPS = 4
ENVIRONMENT = """
from slurmrl.rollouts.base import Environment, PolicyTurn, Reply


class Questions(Environment):
    async def step(self, turn):
        return Reply(text="1+2=", reward=float(len(set(turn.text))))
"""


@pytest.fixture(scope="module")
def server(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("versions_with_experts")
    config = Qwen3MoeConfig(**{**SIZES, **EXPERTS, "tie_word_embeddings": False})
    versions = save_versions(folder, lambda: Qwen3MoeForCausalLM(config))
    options = {"arguments": TIGHT, "experts": True}
    with closing(Served(SglangServer, PYTHON, loop, versions, **options)) as made:
        yield made


@pytest.fixture
def served(server: Served) -> Served:
    server.start_anew()
    return server


async def _drawn(
    served: Served, prompt: tuple[int, ...], n: int, size: int = 16
) -> tuple[Completion, ...]:
    return await served.engine.submit(request(prompt, n, size, experts=True))


@cache
def loaded(folder: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def chosen(folder: Path, prompt: tuple[int, ...], made: Completion) -> bool:
    """Return whether transformers chooses the same experts for each token except the last. Equally
    probable experts (within rounding) may differ.
    """
    assert made.experts is not None
    assert (made.experts[-1] == -1).all(), "the last token was not read"
    tokens = torch.tensor([(*prompt, *made.tokens)])
    logits = torch.stack(loaded(folder)(tokens, output_router_logits=True).router_logits, 1)[:-1]
    taken = torch.from_numpy(made.experts[:-1]).long().view(len(logits), 3, 2)
    least = logits.topk(2).values[..., -1:]
    return bool((logits.gather(-1, taken) > least - EXACT).all())


def actor(folder: Path) -> FSDPEngine:
    return FSDPEngine(
        "actor",
        Model(path=str(folder), optimizer={"lr": 1e-3}),
        head="lm",
        trained=True,
        context=ParallelContext(
            "actor", torch.device("cpu"), 0, (0,), ProcessTopology(("dp",), (1,)), {}
        ),
        seed=3,
        total_steps=10,
        source=folder,
    )


def test_completion_has_the_experts_that_processed_it(served: Served) -> None:
    """This includes tokens of prompts that other completions or earlier turns have prefilled."""
    folder = served.versions["1.1"]
    found = served.loop.run(_drawn(served, PROMPT, 3))
    turn = (*PROMPT, *found[0].tokens, 11, 12)
    read = [(PROMPT, each) for each in found]
    read += [(turn, each) for each in served.loop.run(_drawn(served, turn, 1))]
    assert re.search(r"#cached-token: (?!0)", served.log.read_text())
    for prompt, made in read:
        assert chosen(folder, prompt, made)
    sequences = [(*prompt, *made.tokens) for prompt, made in read]
    batch = SequenceSample.from_default(
        [len(each) for each in sequences],
        list("abcd"),
        {"input_ids": torch.tensor([token for each in sequences for token in each])},
    )
    add_experts(batch, [made.experts for _, made in read if made.experts is not None])
    engine = actor(folder)
    replayed = engine.forward(batch)["logp"].split(batch.item_lengths("input_ids"))
    for logprobs, (prompt, made) in zip(replayed, read, strict=True):
        assert (logprobs[len(prompt) :] - torch.tensor(made.logprobs)).abs().max() < EXACT


def test_experts_are_right_with_chunked_and_repeated_prefill(
    served: Served,
) -> None:
    """Many prompts share a prefix, and do not fit into the cache together."""
    prompts = [(*(7 * place % 128 for place in range(12 * number)), number) for number in range(6)]

    async def work() -> list[tuple[Completion, ...]]:
        return await asyncio.gather(*(_drawn(served, prompt, 2, 60) for prompt in prompts))

    found = served.loop.run(work())
    assert "Retract requests" in served.log.read_text()
    for prompt, completions in zip(prompts, found, strict=True):
        for made in completions:
            assert chosen(served.versions["1.1"], prompt, made)


def test_experts_after_an_update_come_from_the_new_weights(served: Served) -> None:
    """The new weights prefill again the tokens that the old weights sampled."""

    async def attempt(delay_s: float) -> Completion | None:
        future = served.engine.submit(request(max_new_tokens=200, greedy=True, experts=True))
        await asyncio.sleep(delay_s)
        await served.engine.update_weights(served.version("2.1"))
        (made,) = await future
        await served.engine.update_weights(served.version("1.1"))
        return made if len(set(made.versions)) == 2 else None

    made = served.loop.run(midway(attempt))
    assert chosen(served.versions["2.1"], PROMPT, made)
    assert not chosen(served.versions["1.1"], PROMPT, made)


def test_aborted_completion_has_no_experts(served: Served) -> None:
    async def attempt(delay_s: float) -> Completion | None:
        asked = request(max_new_tokens=200, experts=True)
        future = served.engine.submit(asked)
        await asyncio.sleep(delay_s)
        served.engine.abort(asked.request_id)
        (made,) = await future
        return made if made.finish == "aborted" and made.tokens else None

    made = served.loop.run(midway(attempt))
    assert made.experts is None


@pytest.mark.soak
@pytest.mark.parametrize("where", [{"gpus": "0"}, {"tasks": {"max": 1, "max_staleness": 0}}])
def test_trial_trains_with_the_experts_reported_by_its_server(
    where: dict[str, Any], tmp_path: Path
) -> None:
    """Episodes have two turns, and the second turn reads the first turn again."""
    (tmp_path / "environment_of_mine.py").write_text(ENVIRONMENT)
    site = Site(tmp_path)
    config = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 4, "n_minibatches": 1},
        rollout={
            "backend": "sglang:d1",
            **where,
            "python": PYTHON,
            "n": 4,
            "max_new_tokens": 8,
            "replay_experts": True,
            "episode": {
                "name": "multi_turn",
                "environment": {"name": "environment_of_mine:Questions"},
                "max_turns": 2,
            },
        },
    )
    config["actor"]["architecture"] |= {"model_type": "qwen3_moe", **EXPERTS}
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"]["type"] = "prompt"
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    assert site.wait_for_end("grpo/1", timeout_s=500.0)["state"] == "COMPLETED"
    lines = site.metrics("grpo/1")
    check_served(lines, STEPS)
    assert max(line["turns"] for line in lines) > 1.0
