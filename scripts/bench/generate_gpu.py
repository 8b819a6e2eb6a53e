"""Compare decoding on a GPU with the limit of its memory bandwidth (rows of generate.py --gpu).

Decoding one token of all sequences reads every weight of the model and all keys and values once,
and writes one key and value per layer and sequence. The floor is the time for these bytes at the
bandwidth of a device-to-device copy, measured in the same run. Activations and logits do not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from generation import SIZES, Case, own_decoder, reference

MODELS = ("0.5b", "1.5b")
REQUESTS = (1, 64, 256)
PROMPT = 512
FEW, MORE = 32, 288
"""New tokens of two generations. Their difference is a number of calls."""
WIDTH = 2
"""Bytes of a bfloat16 number."""
H100_BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100 by its data sheet."""
COPIED_BYTES = 1 << 30

Generate = Callable[[Case, int], None]
"""Function that generates a number of new tokens for each request."""


class Floor(NamedTuple):
    """Bytes that decoding one token of all sequences moves."""

    weights: int
    cache: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache


def floor(model: str, requests: int) -> Floor:
    """Return the floor for the mean length of sequences between the ends of the two generations."""
    size = SIZES[model]
    hidden, layers = size["hidden_size"], size["num_hidden_layers"]
    kv = size["num_key_value_heads"] * (hidden // size["num_attention_heads"])
    attention = 2 * hidden * hidden + 2 * hidden * kv + hidden + 2 * kv
    layer = attention + 3 * hidden * size["intermediate_size"] + 2 * hidden
    weights = layers * layer + size["vocab_size"] * hidden + hidden
    read = PROMPT + (FEW + MORE) // 2
    return Floor(WIDTH * weights, WIDTH * requests * 2 * layers * kv * (read + 1))


def print_floors() -> None:
    """Print the computed bytes of a token and their time on an H100, from its data sheet."""
    print("| model | requests | weights GB | cache GB | MB per token of a request | floor ms |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for requests in REQUESTS:
            found = floor(model, requests)
            parts = (found.weights / 1e9, found.cache / 1e9, found.bytes / requests / 1e6)
            columns = " | ".join(f"{part:.3g}" for part in parts)
            milliseconds = 1e3 * found.bytes / H100_BYTES_PER_S
            print(f"| {model.upper()} | {requests} | {columns} | {milliseconds:.3g} |")


def prompts(case: Case) -> list[list[int]]:
    vocabulary = SIZES[case.model]["vocab_size"]
    draw = torch.Generator().manual_seed(case.seed)
    drawn: list[list[int]] = torch.randint(
        vocabulary, (case.requests, PROMPT), generator=draw
    ).tolist()
    return drawn


def whole(case: Case, device: str) -> Generate:
    """Generate with requests of the native engine, whose attention reads pages, in CUDA graphs."""
    from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
    from slurmrl.rollouts.generation.native.batch_schedule import Limits
    from slurmrl.rollouts.generation.native.native_rollout import NativeRollout

    decoder = own_decoder(case).to(device, torch.bfloat16)
    limits = Limits(step_tokens=8192)

    async def drawn(case: Case, options: GenerationOptions) -> int:
        engine = NativeRollout(decoder, limits=limits, version="0.1", turns=False, masked=False)
        asked = [
            GenerationRequest(
                request_id=str(number),
                prompt=tuple(prompt),
                keys=(number,),
                seed=case.seed,
                step=0,
                options=options,
            )
            for number, prompt in enumerate(prompts(case))
        ]
        answers = await asyncio.gather(*map(engine.submit, asked))
        return sum(len(made.tokens) for (made,) in answers)

    @torch.no_grad()
    def run(case: Case, new_tokens: int) -> None:
        made = asyncio.run(drawn(case, GenerationOptions(max_new_tokens=new_tokens)))
        assert made == case.requests * new_tokens

    return run


def continuous(case: Case, device: str) -> Generate:
    """transformers' generate_batch()."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = reference(case).to(device, torch.bfloat16)
    cache = ContinuousBatchingConfig(page_size=256, num_blocks=1024, max_batch_tokens=8192)

    def run(case: Case, new_tokens: int) -> None:
        settings = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
        )
        out = model.generate_batch(
            inputs=prompts(case),
            generation_config=settings,
            continuous_batching_config=cache,
            progress_bar=False,
        )
        made = sum(len(result.generated_tokens) for result in out.values())
        assert made == case.requests * new_tokens

    return run


ENGINES: dict[str, Callable[[Case, str], Generate]] = {
    "whole": whole,
    "continuous": continuous,
}


def measure(case: Case, device: str) -> dict[str, float]:
    """Return the seconds of one token of all sequences, and the bandwidth of a copy."""
    generate = ENGINES[case.engine](case, device)
    generate(case, FEW)  # warm-up: kernels are compiled and checked
    few, more = (_seconds(generate, case, new_tokens, device) for new_tokens in (FEW, MORE))
    return {"token_s": (more - few) / (MORE - FEW), "bandwidth": _bandwidth(device)}


def _seconds(generate: Generate, case: Case, new_tokens: int, device: str) -> float:
    found = []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        generate(case, new_tokens)
        _wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _bandwidth(device: str) -> float:
    source = torch.empty(COPIED_BYTES if device == "cuda" else 1 << 26, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    found = []
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        _wait(device)
        found.append(time.perf_counter() - began)
    return 10 * 2 * source.numel() / min(found)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def title() -> str:
    return (
        f"{'engine':12}{'model':>7}{'requests':>9}{'ms a token':>12}{'tokens/s':>10}"
        f"{'floor ms':>10}{'of the floor':>14}"
    )


def line(case: Case, found: dict[str, float]) -> str:
    least_s = floor(case.model, case.requests).bytes / found["bandwidth"]
    return (
        f"{case.engine:12}{case.model:>7}{case.requests:9}{1e3 * found['token_s']:12.3f}"
        f"{case.requests / found['token_s']:10.0f}{1e3 * least_s:10.3f}"
        f"{least_s / found['token_s']:14.1%}"
    )
