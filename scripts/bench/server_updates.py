#!/usr/bin/env python3
"""How long a server takes for new weights, by each way of rollout.server_updates.

scripts/bench/server_updates.py --engine sglang|vllm --python PYTHON [--hidden 1024] [--layers 4]
    [--rounds 5] [--ways files broadcast tensors]

The server and its client are those of a trial, on CPUs of this host and in float32; PYTHON is that
of the engine's environment (`scripts/test-engines --variables`). Two versions of random weights
take turns. They are in this host's memory, so `files` is what a server of the run's own does. An
update is that of a trial: pause, weights, checks, resume. The first one of each way, which may form
a process group, does not count. A line has the median, the least and the most of the rounds, and
the median as a multiple of the first way's. `broadcast` to vLLM needs slurmrl in the server's
environment, too (docs/engines.md).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kept_server import KINDS, KeptServer

from slurmrl.config.servers import ServerUpdates
from slurmrl.engines.initial_weights import init_tensor
from slurmrl.engines.rollout.base import WeightVersion
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.served import ServedEngine
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.hf import to_hf
from slurmrl.plan.engines import ENGINES


def architecture(hidden: int, layers: int) -> ModelConfig:
    values = {
        "model_type": "qwen2",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": 2816 * hidden // 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_hf(values)


def write(model: ModelConfig, folder: Path, seed: int) -> int:
    """Returns the bytes of the weights."""
    decoder = build(model).requires_grad_(False)
    shapes = {name: tuple(value.shape) for name, value in decoder.state_dict().items()}
    state = {name: init_tensor(name, shape, model, seed) for name, shape in shapes.items()}
    decoder.load_state_dict(state)
    folder.mkdir(parents=True)
    to_hf(decoder, folder)
    return sum(value.nbytes for value in state.values())


async def measure(server: KeptServer, way: ServerUpdates, rounds: int) -> list[float]:
    """Seconds of each update but the first."""
    server.kind.updates = way
    engine = await ServedEngine.connect(server.kind.dialect(HttpClient(server.address)))
    took = []
    try:
        for number in range(1 + rounds):
            name = str(number % 2)
            version = WeightVersion(name=name, folder=server.folder / "weights" / name)
            began = time.monotonic()
            await engine.update_weights(version)
            took.append(time.monotonic() - began)
    finally:
        await engine.close()
    return took[1:]


async def run(options: argparse.Namespace) -> None:
    model = architecture(options.hidden, options.layers)
    arguments: tuple[str, ...] = ()
    if options.engine == "vllm" and "broadcast" in options.ways:
        arguments = ("--weight-transfer-config", '{"backend": "slurmrl"}')
    server = KeptServer(options.engine, options.python, model, arguments=arguments)
    try:
        for seed in range(2):
            size = write(model, server.folder / "weights" / str(seed), seed)
        await server.server.up()
        print(f"{size / 1e6:.0f} MB, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        print(f"{options.engine:10}{'median s':>9}{'least':>8}{'most':>8}{'ratio':>8}")
        first: float | None = None
        for way in options.ways:
            took = await measure(server, way, options.rounds)
            median = statistics.median(took)
            first = first or median
            row = f"{way:10}{median:9.2f}{min(took):8.2f}{max(took):8.2f}{median / first:8.2f}"
            print(row, flush=True)
    finally:
        await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=KINDS, required=True)
    parser.add_argument("--python", required=True, help="of the engine's environment")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="default: all of the engine's")
    options = parser.parse_args()
    ways: Any = ENGINES[options.engine].server_updates
    options.ways = options.ways or ways
    if unknown := set(options.ways) - set(ways):
        parser.error(f"--ways {' '.join(sorted(unknown))}: allowed are {' '.join(ways)}")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
