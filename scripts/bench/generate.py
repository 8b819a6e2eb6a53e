#!/usr/bin/env python3
"""Compare the speed of generation on one CPU thread: tokens per second of CPU time.

scripts/bench/generate.py [--model small|medium] [--requests 16 128 512] [--n 1 8]
    [--engines native whole slab padded transformers continuous] [--seed 0]

native        the native engine: continuous batching over a paged cache, for single requests
whole         the same for a whole batch: generation of the trainers' world on CPUs
slab          the same on GPUs and for split models: all rows at once, in one slab
padded        a plain loop around transformers: prompts padded on the left, rows stay to the end
transformers  transformers' generate() on one padded batch
continuous    transformers' generate_batch(), continuous batching over a paged cache

Each runs in a process of its own, with one thread, float32 and the same random model. Prompts have
8 to 512 tokens, log-uniformly. One in 128 tokens of the vocabulary ends a completion and the model
is near uniform, so lengths are geometric with mean 128, and 512 at most. Draws differ between
programs, lengths only in law. A line has new tokens per second of CPU time of the process, and the
wall time, the tokens of prompts that were read as a share of all prompts times n, and the peak of
memory beyond that before generation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "medium": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}
PROMPTS = (8, 512)
MEAN = 128
LIMIT = 512


class Case(NamedTuple):
    """What one process measures."""

    engine: str
    model: str
    requests: int
    n: int
    seed: int


class Made(NamedTuple):
    """What an engine has generated."""

    tokens: int
    read: int | None
    """Tokens of prompts that the model has read; None where it is not known."""


def prompts(case: Case) -> list[list[int]]:
    draw = random.Random(case.seed)
    low, high = PROMPTS
    vocabulary = SIZES[case.model]["vocab_size"]
    lengths = [round(low * (high / low) ** draw.random()) for _ in range(case.requests)]
    return [[draw.randrange(MEAN, vocabulary) for _ in range(length)] for length in lengths]


def stops(case: Case) -> list[int]:
    return list(range(SIZES[case.model]["vocab_size"] // MEAN))


def config(case: Case) -> dict[str, Any]:
    return {"model_type": "qwen2", "max_position_embeddings": 2048, **SIZES[case.model]}


def own_decoder(case: Case) -> Any:
    from slurmrl.engines.initial_weights import init_tensor
    from slurmrl.models.config import ModelConfig
    from slurmrl.models.decoder import build

    decoder = build(ModelConfig.from_hf(config(case)))
    state = {
        name: init_tensor(name, tuple(value.shape), decoder.config, case.seed)
        for name, value in decoder.state_dict().items()
    }
    decoder.load_state_dict(state)
    return decoder.requires_grad_(False)


def reference(case: Case) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(case.seed)
    settings = transformers.AutoConfig.for_model(**config(case))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def native(case: Case) -> Callable[[], Made]:
    from slurmrl.engines.rollout.base import GenerationRequest
    from slurmrl.engines.rollout.native.rollout import NativeRollout
    from slurmrl.models.generate import GenerationOptions

    decoder = own_decoder(case)
    options = GenerationOptions(max_new_tokens=LIMIT, stop_token_ids=tuple(stops(case)))

    async def run() -> Made:
        engine = NativeRollout(decoder, version="0.1")
        requests = [
            GenerationRequest(
                request_id=str(i),
                prompt=tuple(prompt),
                keys=tuple(range(i * case.n, (i + 1) * case.n)),
                seed=case.seed,
                step=0,
                options=options,
            )
            for i, prompt in enumerate(prompts(case))
        ]
        results = await asyncio.gather(*map(engine.submit, requests))
        new = [len(completion.tokens) for result in results for completion in result]
        # Every token drawn is read as well, but for the last of each completion.
        return Made(sum(new), engine.read - sum(new) + len(new))

    return lambda: asyncio.run(run())


def whole(case: Case) -> Callable[[], Made]:
    from slurmrl.engines.rollout.native.schedule import Limits
    from slurmrl.engines.rollout.native.whole import generate_by_requests

    return _trainers(case, generate_by_requests, limits=Limits())


def slab(case: Case) -> Callable[[], Made]:
    from slurmrl.models.generate import generate

    return _trainers(case, generate)


def _trainers(case: Case, generate: Callable[..., Any], **more: Any) -> Callable[[], Made]:
    import torch

    from slurmrl.models.generate import GenerationOptions

    decoder, texts = own_decoder(case), prompts(case)
    options = GenerationOptions(max_new_tokens=LIMIT, stop_token_ids=tuple(stops(case)))

    def run() -> Made:
        cu = torch.tensor([0, *map(len, texts)]).cumsum(0).to(torch.int32)
        flat = torch.tensor([token for text in texts for token in text])
        keys = torch.arange(case.requests * case.n)
        out = generate(decoder, flat, cu, options, seed=case.seed, step=0, keys=keys, **more)
        return Made(int((out.lengths - out.prompt_lengths).sum()), None)

    return run


def _left_padded(case: Case) -> tuple[Any, Any]:
    import torch

    texts = [text for text in prompts(case) for _ in range(case.n)]
    longest = max(map(len, texts))
    ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :], mask[row, longest - len(text) :] = torch.tensor(text), 1
    return ids, mask


def padded(case: Case) -> Callable[[], Made]:
    import torch

    model, (ids, mask) = reference(case), _left_padded(case)
    ends = torch.tensor(stops(case))

    @torch.no_grad()
    def run() -> Made:
        seen, positions = mask, (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1)
        alive, total = torch.ones(len(ids), dtype=torch.bool), 0
        place = positions[:, -1:]
        for _ in range(LIMIT):
            logits = out.logits[:, -1]
            tokens = logits.softmax(-1).multinomial(1)
            logits.log_softmax(-1).gather(-1, tokens)
            total += int(alive.sum())
            alive &= ~torch.isin(tokens[:, 0], ends)
            if not alive.any():
                break
            seen = torch.cat((seen, seen.new_ones((len(ids), 1))), 1)
            place = place + 1
            out = model(
                input_ids=tokens,
                attention_mask=seen,
                position_ids=place,
                past_key_values=out.past_key_values,
            )
        return Made(total, int(mask.sum()))

    return run


def transformers(case: Case) -> Callable[[], Made]:
    import torch

    model, (ids, mask) = reference(case), _left_padded(case)
    ends = stops(case)

    def run() -> Made:
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=LIMIT,
            do_sample=True,
            top_k=0,
            eos_token_id=ends,
            pad_token_id=ends[0],
            output_scores=False,
        )
        new = out[:, ids.shape[1] :]
        ended = torch.isin(new, torch.tensor(ends)).cumsum(-1)
        return Made(int(((ended - torch.isin(new, torch.tensor(ends)).long()) == 0).sum()), None)

    return run


def continuous(case: Case) -> Callable[[], Made]:
    from transformers import GenerationConfig

    model = reference(case)
    settings = GenerationConfig(
        max_new_tokens=LIMIT, do_sample=True, top_k=0, eos_token_id=stops(case), pad_token_id=0
    )
    texts = [text for text in prompts(case) for _ in range(case.n)]

    def run() -> Made:
        out = model.generate_batch(inputs=texts, generation_config=settings, progress_bar=False)
        return Made(sum(len(result.generated_tokens) for result in out.values()), None)

    return run


ENGINES: dict[str, Callable[[Case], Callable[[], Made]]] = {
    "native": native,
    "whole": whole,
    "slab": slab,
    "padded": padded,
    "transformers": transformers,
    "continuous": continuous,
}


def measure(case: Case) -> dict[str, float | None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    ENGINES[case.engine](case._replace(requests=2))()  # warm up
    run = ENGINES[case.engine](case)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = time.process_time(), time.monotonic()
    made = run()
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = sum(map(len, prompts(case))) * case.n
    return {
        "tokens": made.tokens,
        "rate": made.tokens / cpu,
        "wall": wall,
        "read": None if made.read is None else made.read / whole,
        "memory": (after - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)))))
        return
    print(
        f"{'engine':14}{'requests':>9}{'n':>3}{'tokens':>9}{'per CPU s':>11}{'wall s':>8}", end=""
    )
    print(f"{'prompts read':>14}{'MiB':>7}")
    for requests in options.requests:
        for n in options.n:
            for engine in options.engines:
                case = Case(engine, options.model, requests, n, options.seed)
                show(case, measured(case))


def measured(case: Case) -> dict[str, Any] | None:
    """The figures of one process; None if it failed."""
    command = [sys.executable, __file__, "--case", json.dumps(case._asdict())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(case: Case, found: dict[str, Any] | None) -> None:
    print(f"{case.engine:14}{case.requests:9}{case.n:3}", end="")
    if found is None:
        print("  failed", flush=True)
        return
    read = "" if found["read"] is None else f"{found['read']:.1%}"
    print(
        f"{found['tokens']:9}{found['rate']:11.0f}{found['wall']:8.1f}{read:>14}"
        f"{found['memory']:7.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
