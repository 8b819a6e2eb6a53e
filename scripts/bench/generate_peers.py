"""Rows of generate.py that need environments of their own: servers, and TRL.

A server is started with the settings and by the classes of a trial with `rollout.backend`, and gets
its requests over a Unix socket, as in a trial. TRL's side runs in TRL's environment.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from slurmrl.engines.rollout.servers import Speak

CELLS = 1 << 18
"""Tokens in a server's cache: the largest case that is worth a measurement fits."""
IDENTIFIERS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class ServerKind:
    """How the server of an engine is started and spoken to."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    speak: Speak


def sglang(case: Case) -> Run:
    from slurmrl.engines.rollout import sglang_server
    from slurmrl.engines.rollout.sglang import SglangDialect

    def kind(model: Path, socket: Path) -> ServerKind:
        options = (*sglang_server.CPU_FLAGS, "--max-total-tokens", str(CELLS), "--dtype", "float32")
        vocabulary = SIZES[case.model]["vocab_size"]
        return ServerKind(
            sglang_server.command(
                case.python, model, socket, vocabulary=vocabulary, options=options
            ),
            sglang_server.ENVIRONMENT,
            lambda client, control=None: SglangDialect(client, control, model=served_model(case)),
        )

    return _served(case, kind)


def vllm(case: Case) -> Run:
    from slurmrl.engines.rollout import vllm_server
    from slurmrl.engines.rollout.vllm import VllmDialect

    def kind(model: Path, socket: Path) -> ServerKind:
        options = (*vllm_server.CPU_FLAGS, "--dtype", "float32")
        return ServerKind(
            vllm_server.command(case.python, model, socket, options=options),
            {**vllm_server.ENVIRONMENT, **vllm_server.CPU_ENVIRONMENT},
            lambda client, control=None: VllmDialect(client, control, model=served_model(case)),
        )

    return _served(case, kind)


def served_model(case: Case) -> Any:
    from slurmrl.engines.rollout.fitness import ServedModel

    vocabulary = SIZES[case.model]["vocab_size"]
    return ServedModel(architecture="Qwen2ForCausalLM", vocabulary=vocabulary)


def _served(case: Case, kind_of: Any) -> Run:
    """A server that has the weights. It ends with this process."""
    from slurmrl.engines.rollout.base import WeightVersion
    from slurmrl.engines.rollout.host_folder import HostFolder
    from slurmrl.engines.rollout.process import ServerProgram
    from slurmrl.engines.rollout.server import Patience
    from slurmrl.engines.rollout.servers import PlacedServer
    from slurmrl.models.hf import to_hf

    folder = HostFolder()
    model = folder.path / "model"
    model.mkdir()
    to_hf(own_decoder(case), model)
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **IDENTIFIERS}))
    socket = folder.path / "server.sock"
    kind = kind_of(model, socket)
    logs = tempfile.TemporaryDirectory(prefix="slurmrl-bench-")
    atexit.register(logs.cleanup)
    program = ServerProgram(
        name=case.engine,
        command=kind.command,
        environment={**os.environ, **kind.environment},
        log=Path(logs.name) / f"{case.engine}.log",
    )
    runner = asyncio.Runner()
    made: list[PlacedServer] = []

    async def start() -> None:
        patience = Patience(silence_s=600.0)  # it may share its thread with other programs
        made.append(PlacedServer(folder, program, socket, kind.speak, patience))
        await made[0].up()
        await made[0].install(WeightVersion(name="0.1", folder=model))

    async def draw(case: Case) -> Made:
        results = await asyncio.gather(*map(made[0].engine.submit, requests(case)))
        return Made(sum(len(c.tokens) for result in results for c in result), None)

    def close() -> None:
        if made:
            runner.run(made[0].close())
        runner.close()

    atexit.register(close)
    runner.run(start())
    return lambda case: runner.run(draw(case))


def trl(case: Case) -> Run:
    """GRPOTrainer's generation, as in a step: prompts padded on the left, rows stay to the end."""
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
    """The tokens of a completion, with the one that ends it."""
    import torch

    places = torch.isin(row, torch.tensor(ends)).nonzero()
    return int(places[0]) + 1 if len(places) else len(row)
