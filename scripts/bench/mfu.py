#!/usr/bin/env python3
"""Measure the share of the device's matrix rate that training uses (model FLOP/s utilization).

scripts/bench/mfu.py [--sequences 4] [--length 4096] [--steps 10] [--checkpointing selective]

A random qwen2-like decoder is trained by SFT: slurmrl's fsdp engine, then transformers with the
same sizes, batch, dtype and attention of torch. On a GPU, the decoder has 0.5 billion parameters
and computes in bfloat16. On a CPU, it has 7 million in float32, and only shows that the script
works. The limit is the rate of one large matrix product, measured in the same run.
``slurmrl.models.architecture`` counts the operations of both, so recomputed operations do not
count. The goal on a GPU is 50 %. The script prints rate and share of the median step, and in
brackets the shares of the slowest and the fastest step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from spread import Spread
from torch import Tensor

from slurmrl.algorithms.supervised import sft_loss
from slurmrl.config.schema.roles import Model
from slurmrl.data.sample import SequenceSample
from slurmrl.engines import ENGINES
from slurmrl.plan.estimates.call_costs import BACKWARD, forward_flops
from slurmrl.plan.estimates.shape import read
from slurmrl.tensors.parallel import device
from slurmrl.tensors.parallel.groups import build

GPU = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 65536}
CPU = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 2048}
WARM_UP = 3
Step = Callable[[], object]


def architecture(sizes: dict[str, int], length: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "num_attention_heads": sizes["hidden_size"] // 64,
        "num_key_value_heads": sizes["hidden_size"] // 256,
        "max_position_embeddings": length,
        **sizes,
    }


def seconds(step: Step, steps: int, wait: Step) -> Spread:
    """Return the seconds of one step."""
    times = []
    for _ in range(WARM_UP + steps):
        wait()
        began = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - began)
    return Spread.of(times[WARM_UP:])


def matrix_rate(size: int, dtype: torch.dtype, where: torch.device, wait: Step) -> float:
    """Return the median FLOP/s of the product of two large square matrices."""
    a, b = (torch.randn(size, size, dtype=dtype, device=where) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.matmul(a, b, out=out), 10, wait).median


def slurmrl_step(
    shape: dict[str, Any], ids: Tensor, dtype: str, checkpointing: str, where: torch.device
) -> Step:
    placed: Any = argparse.Namespace(role="actor", ranks=(0,), sizes={"dp": 1})
    engine = ENGINES.load("fsdp")(
        "actor",
        Model.model_validate(
            {
                "architecture": shape,
                "dtype": dtype,
                "gradient_checkpointing": checkpointing,
                "max_tokens_per_microbatch": ids.numel(),
            }
        ),
        head="lm",
        trained=True,
        context=build([placed], rank=0, device=where)["actor"],
        seed=1,
        total_steps=1000,
        source=None,
    )
    sequences, length = ids.shape
    first = torch.zeros(ids.shape, dtype=torch.bool)
    first[:, 0] = True
    keys = {"input_ids": ids.flatten(), "prompt_mask": first.flatten()}
    names = [str(number) for number in range(sequences)]
    sample = SequenceSample.from_default([length] * sequences, names, keys)
    return lambda: engine.train_batch(sample, sft_loss, sequences * (length - 1))


def transformers_step(shape: dict[str, Any], ids: Tensor, dtype: str, where: torch.device) -> Step:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(where).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    ids = ids.to(where)

    def step() -> None:
        with torch.autocast(where.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, help="(default: 4096, on a CPU 256)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpointing", default="off", help="off, selective or full, of slurmrl")
    options = parser.parse_args()
    accelerator = device.choose(int(torch.cuda.is_available()))
    device.set_up(accelerator, threads=1, deterministic=False)
    where, gpu = accelerator.device, accelerator.device.type == "cuda"
    dist.init_process_group(accelerator.backend, store=dist.HashStore(), rank=0, world_size=1)
    wait: Step = torch.cuda.synchronize if gpu else lambda: None
    dtype, length = ("bfloat16", 4096) if gpu else ("float32", 256)
    length = options.length or length
    rate = matrix_rate(8192 if gpu else 1024, getattr(torch, dtype), where, wait)
    name = torch.cuda.get_device_name() if gpu else "CPU, one thread"
    print(f"{name}, {dtype}: matrix product {rate / 1e12:.3g} TFLOP/s", flush=True)
    shape = architecture(GPU if gpu else CPU, length)
    ids = torch.randint(shape["vocab_size"], (options.sequences, length))
    sizes = read(shape)
    assert sizes is not None
    work = (1 + BACKWARD) * options.sequences * forward_flops(sizes, "lm", length)
    for label, make in (
        ("slurmrl", lambda: slurmrl_step(shape, ids, dtype, options.checkpointing, where)),
        ("transformers", lambda: transformers_step(shape, ids, dtype, where)),
    ):
        took = seconds(make(), options.steps, wait)
        shares = Spread(*(work / time_s / rate for time_s in (took.median, took.most, took.least)))
        speed = ids.numel() / took.median
        print(f"{label:<13} {speed:10.0f} tokens/s   {shares.text('.1%')}", flush=True)


if __name__ == "__main__":
    main()
