#!/usr/bin/env python3
"""Compare the speed of generation on one CPU thread (tokens per second of CPU time), or on a GPU.

scripts/bench/generate.py [--model small|medium] [--requests 16 128 512] [--n 1 8] [--seed 0]
    [--engines native padded transformers continuous trl sglang vllm]
    [--trl-python PYTHON] [--sglang-python PYTHON] [--vllm-python PYTHON]
scripts/bench/generate.py --gpu [--model 0.5b|1.5b] [--requests 1 64 256]
    [--engines whole continuous]
scripts/bench/generate.py --floors

native        the native engine: continuous batching over a paged cache
padded        a plain loop around transformers: prompts padded on the left, rows stay to the end
transformers  transformers' generate() on one padded batch
continuous    transformers' generate_batch(), continuous batching over a paged cache
trl           the generation of TRL's GRPOTrainer with its default backend
sglang        a server of rollout.backend sglang on CPUs, with its client
vllm          a server of rollout.backend vllm on CPUs, with its client

The last three engines need the Python of a separate environment (scripts/test-trl,
`scripts/test-engines --variables`). Without it, they are omitted. Each engine runs in a separate
process, with one thread for operators, float32 and the same sizes of a random model. Prompts have 8
to 512 tokens, log-uniformly. One in 128 tokens of the vocabulary ends a completion, and the model
is nearly uniform. Lengths are therefore geometric with a mean of 128 and a maximum of 512. Programs
sample different tokens, but the distribution of lengths is the same. A line has: new tokens per
second of CPU time of all processes of the engine (the start of a server and a first small batch do
not count); the wall time; the prefilled tokens as a share of all prompts times n, if known; the
increase of the peak of resident memory during generation; and the bytes of keys and values of all
completions and, once each, of the prompts. The caches that servers reserve at their start do not
count.

--gpu measures decoding in bfloat16 of a model with the sizes of Qwen2.5. It prints the milliseconds
for one token of all sequences after prompts of 512 tokens, from the difference of two generations.
It also prints the share of this time that reading weights, keys and values would take at the
bandwidth of a copy. --floors prints these bytes and their time at an H100's bandwidth; it needs no
GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate_gpu
from generate_peers import sglang, trl, vllm
from generation import (
    LIMIT,
    SIZES,
    Case,
    Made,
    Run,
    kv_bytes,
    own_decoder,
    prompts,
    reference,
    requests,
    stops,
)
from process_tree import reset_peaks, usage

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def native(case: Case) -> Run:
    from slurmrl.rollouts.generation.native.native_rollout import NativeRollout

    decoder = own_decoder(case)

    async def run(case: Case) -> Made:
        engine = NativeRollout(decoder, version="0.1")
        results = await asyncio.gather(*map(engine.submit, requests(case)))
        new = [len(completion.tokens) for result in results for completion in result]
        # The engine also processes every sampled token except the last token of each completion.
        return Made(sum(new), engine.read - sum(new) + len(new))

    return lambda case: asyncio.run(run(case))


def _left_padded(case: Case) -> tuple[Any, Any]:
    import torch

    texts = [text for text in prompts(case) for _ in range(case.n)]
    longest = max(map(len, texts))
    ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :], mask[row, longest - len(text) :] = torch.tensor(text), 1
    return ids, mask


def padded(case: Case) -> Run:
    import torch

    model, ends = reference(case), torch.tensor(stops(case))

    @torch.no_grad()
    def run(case: Case) -> Made:
        ids, mask = _left_padded(case)
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


def transformers(case: Case) -> Run:
    import torch

    model, ends = reference(case), stops(case)

    def run(case: Case) -> Made:
        ids, mask = _left_padded(case)
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


def continuous(case: Case) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = reference(case)
    # the server's default is nine tenths of the machine's memory
    cache = ContinuousBatchingConfig(page_size=256, num_blocks=1024, max_batch_tokens=2048)
    settings = GenerationConfig(
        max_new_tokens=LIMIT, do_sample=True, top_k=0, eos_token_id=stops(case), pad_token_id=0
    )

    def run(case: Case) -> Made:
        texts = [text for text in prompts(case) for _ in range(case.n)]
        out = model.generate_batch(
            inputs=texts,
            generation_config=settings,
            continuous_batching_config=cache,
            progress_bar=False,
        )
        return Made(sum(len(result.generated_tokens) for result in out.values()), None)

    return run


ENGINES: dict[str, Callable[[Case], Run]] = {
    "native": native,
    "padded": padded,
    "transformers": transformers,
    "continuous": continuous,
    "trl": trl,
    "sglang": sglang,
    "vllm": vllm,
}
ELSEWHERE = ("trl", "sglang", "vllm")
"""Engines that need the interpreter of another environment."""


def measure(case: Case) -> dict[str, float | None]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    run = ENGINES[case.engine](case)
    run(case._replace(requests=2))  # warm up
    reset_peaks()
    before, began = usage(), time.monotonic()
    made = run(case)
    after, wall = usage(), time.monotonic() - began
    whole = sum(map(len, prompts(case))) * case.n
    return {
        "tokens": made.tokens,
        "rate": made.tokens / (after.cpu_s - before.cpu_s),
        "wall": wall,
        "read": None if made.read is None else made.read / whole,
        "memory": (after.peak_kib - before.resident_kib) / 1024,
        "kv": kv_bytes(case, made.tokens) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SIZES, help="default: small; 1.5b on a GPU")
    parser.add_argument("--requests", type=int, nargs="+", help="default: 16 128 512; 1 64 256")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--engines",
        choices=ENGINES,
        nargs="+",
        help="default: all engines whose environment exists or is named",
    )
    for engine in ELSEWHERE:
        parser.add_argument(f"--{engine}-python", help=f"Python of an environment with {engine}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="decode on this machine's GPU")
    parser.add_argument("--floors", action="store_true", help="print the minimum bytes of decoding")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = Case(**json.loads(options.case))
        found = generate_gpu.measure(case, "cuda") if options.gpu else measure(case)
        print(json.dumps(found))
        return
    if options.floors:
        generate_gpu.print_floors()
        return
    if options.gpu:
        measure_gpu(parser, options)
        return
    options.model = options.model or "small"
    options.requests = options.requests or [16, 128, 512]
    pythons = {name: getattr(options, f"{name}_python") for name in ELSEWHERE}
    pythons = {name: pythons.get(name, sys.executable) for name in ENGINES}
    engines = options.engines or [name for name, python in pythons.items() if python]
    for engine in engines:
        if not pythons[engine]:
            parser.error(f"--engines {engine} needs --{engine}-python")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'engine':14}{'requests':>9}{'n':>3}{'tokens':>9}{'per CPU s':>11}{'wall s':>8}", end=""
    )
    print(f"{'prompts read':>14}{'MiB':>7}{'KV MiB':>8}")
    for count in options.requests:
        for n in options.n:
            for engine in engines:
                case = Case(engine, options.model, count, n, options.seed, pythons[engine])
                show(case, measured(case))


def measure_gpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    import torch

    engines = options.engines or list(generate_gpu.ENGINES)
    if unknown := [name for name in engines if name not in generate_gpu.ENGINES]:
        parser.error(f"--gpu measures {', '.join(generate_gpu.ENGINES)}, not {', '.join(unknown)}")
    if not torch.cuda.is_available():
        sys.exit("generate: torch sees no GPU")
    print(torch.cuda.get_device_name())
    print(generate_gpu.title())
    for count in options.requests or generate_gpu.REQUESTS:
        for engine in engines:
            case = Case(engine, options.model or "1.5b", count, 1, options.seed, sys.executable)
            found = measured(case, "--gpu")
            failed = f"{engine:12}{case.model:>7}{count:9}  failed"
            print(failed if found is None else generate_gpu.line(case, found), flush=True)


def measured(case: Case, *more: str) -> dict[str, Any] | None:
    """Return the numbers of one process; None if it failed."""
    python = case.python if case.engine == "trl" else sys.executable
    command = [python, __file__, *more, "--case", json.dumps(case._asdict())]
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
        f"{found['memory']:7.0f}{found['kv']:8.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
