"""Rows of generate.py that need separate environments: servers and TRL.

A server is started with the settings and by the classes of a trial with `rollout.backend`, and gets
its requests over a Unix socket, as in a trial. TRL's side runs in TRL's environment.
"""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from typing import Any

from generation import (
    LIMIT,
    SIZES,
    Case,
    Made,
    Run,
    own_decoder,
    prompts,
    reference,
    requests,
    stops,
)

CELLS = 1 << 18
"""Number of tokens in a server's cache. The largest useful case fits."""


def sglang(case: Case) -> Run:
    return _served(case, "--max-total-tokens", str(CELLS))


def vllm(case: Case) -> Run:
    return _served(case)


def _served(case: Case, *arguments: str) -> Run:
    """Start a server that has the weights and that ends with this process."""
    from kept_server import BenchServer

    from slurmrl.rollouts.generation.base import WeightVersion
    from tests.support.decoder_folders import to_hf

    runner = asyncio.Runner()
    decoder, made = own_decoder(case), []

    async def start() -> None:
        made.append(BenchServer(case.engine, case.python, decoder.config, arguments=arguments))
        weights = made[0].folder / "weights"
        weights.mkdir()
        to_hf(decoder, weights)
        await made[0].server.engine.start()
        await made[0].server.engine.update_weights(WeightVersion(name="0.1", folder=weights))

    async def draw(case: Case) -> Made:
        results = await asyncio.gather(*map(made[0].server.engine.submit, requests(case)))
        return Made(sum(len(c.tokens) for result in results for c in result), None)

    def close() -> None:
        if made:
            runner.run(made[0].close())
        runner.close()

    atexit.register(close)
    runner.run(start())
    return lambda case: runner.run(draw(case))


def trl(case: Case) -> Run:
    """Generate like GRPOTrainer in a step: prompts are padded on the left, and rows stay to the
    end.
    """
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    folder = tempfile.TemporaryDirectory(prefix="slurmrl-bench-")
    atexit.register(folder.cleanup)
    ends = stops(case)
    words = {f"w{n}": n for n in range(SIZES[case.model]["vocab_size"])}
    settings = GRPOConfig(
        output_dir=folder.name,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=LIMIT,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        generation_kwargs={"eos_token_id": ends},
    )
    trainer = GRPOTrainer(
        model=reference(case).requires_grad_(True),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w0"]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, "w0")),
            pad_token="w0",
            eos_token="w0",
        ),
    )

    def run(case: Case) -> Made:
        texts = [text for text in prompts(case) for _ in range(case.n)]
        out = trainer._generate_single_turn(texts, None, {}, case.n)
        rows = [torch.tensor(row) for row in out[0]]
        return Made(sum(until_stop(row, ends) for row in rows), None)

    return run


def until_stop(row: Any, ends: list[int]) -> int:
    """Return the tokens of a completion, including the token that ends it."""
    import torch

    places = torch.isin(row, torch.tensor(ends)).nonzero()
    return int(places[0]) + 1 if len(places) else len(row)
