"""A real SGLang server that computes with torch on a CPU, for the tests of several files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from slurmrl.config.servers import Address
from slurmrl.rollouts.generation import sglang
from slurmrl.rollouts.generation.base import Completion
from slurmrl.rollouts.generation.fitness import ServedModel
from slurmrl.rollouts.generation.http import HttpClient
from slurmrl.rollouts.generation.kept import KeptEngine
from slurmrl.rollouts.generation.process import HostFolder, ServerProgram
from slurmrl.rollouts.generation.served import ServedEngine
from slurmrl.rollouts.generation.sglang import SglangDialect
from tests.engines.conftest import (
    EXACT,
    PATIENCE,
    VOCABULARY,
    Loop,
    SharedServer,
    logprobs,
    over_an_update,
)


class Served(SharedServer):
    """The engine of a server that is kept, and the process that tests hurt."""

    def __init__(
        self,
        python: str,
        loop: Loop,
        versions: dict[str, Path],
        tokenizer: PreTrainedTokenizerFast,
        logs: Path,
    ) -> None:
        tokenizer.save_pretrained(logs / "tokenizer")
        super().__init__(loop, versions)
        self.folder = HostFolder()
        self.socket = self.folder.path / "server.sock"
        self.program = ServerProgram(
            name="sglang server",
            command=sglang.command(
                python,
                versions["1.1"],
                self.socket,
                vocabulary=VOCABULARY,
                tokenizer=logs / "tokenizer",
                options=(*sglang.CPU_FLAGS, "--dtype", "float32"),
            ),
            environment={**os.environ, **sglang.ENVIRONMENT},
            log=logs / "sglang.log",
        )
        self.engine = loop.run(self._make())

    async def _make(self) -> KeptEngine:
        address = Address(f"unix:{self.socket}")
        return KeptEngine(self.program, address, dialect, patience=PATIENCE)

    def close(self) -> None:
        self.loop.run(self.engine.close())
        self.folder.close()

    def main(self) -> int:
        """The pid of the server's main process: its command ends with a port."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(self.socket).encode() in words and b"-I" not in words:
                return int(process.name)
        raise AssertionError("the server does not run")


def dialect(
    client: HttpClient,
    vocabulary: int = VOCABULARY,
    *,
    stale_cache: bool = False,
) -> SglangDialect:
    model = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=vocabulary)
    return SglangDialect(client, model=model, stale_cache=stale_cache)


def check(
    folder: Path, prompt: tuple[int, ...], made: Completion, temperature: float = 1.0
) -> None:
    """The log-probabilities are those of transformers."""
    values = logprobs(folder, [*prompt, *made.tokens], temperature)[len(prompt) - 1 :]
    expected = values.gather(-1, torch.tensor(made.tokens)[:, None]).squeeze(-1)
    assert (expected - torch.tensor(made.logprobs)).abs().max() < EXACT


async def with_a_stale_cache(served: Served) -> list[Completion]:
    """What `over_an_update` returns of another client of the server."""
    client = HttpClient(Address(f"unix:{served.socket}"))
    engine = await ServedEngine.connect(dialect(client, stale_cache=True))
    try:
        drawn = await over_an_update(engine, served.versions)
        await engine.update_weights(served.version("1.1"))  # as the server's own client has left it
        return drawn
    finally:
        await engine.close()
