"""A real SGLang server that computes with torch on a CPU, for the tests of several files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from slurmrl.config.servers import Address, ServerUpdates
from slurmrl.engines.rollout import sglang_server
from slurmrl.engines.rollout.base import Completion
from slurmrl.engines.rollout.fitness import ServedModel
from slurmrl.engines.rollout.host_folder import HostFolder
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.kept import KeptEngine
from slurmrl.engines.rollout.process import ServerProgram
from slurmrl.engines.rollout.served import ServedEngine
from slurmrl.engines.rollout.sglang import SglangDialect
from slurmrl.engines.rollout.sglang_sender import SglangSender
from slurmrl.engines.rollout.sglang_tensors import SglangTensors
from slurmrl.errors import RunFailedError
from tests.engines.conftest import (
    EXACT,
    PATIENCE,
    PROMPT,
    VOCABULARY,
    Loop,
    SharedServer,
    load_in_turn,
    logprobs,
    over_an_update,
    with_another_shape,
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
            command=sglang_server.command(
                python,
                versions["1.1"],
                self.socket,
                vocabulary=VOCABULARY,
                tokenizer=logs / "tokenizer",
                options=(*sglang_server.CPU_FLAGS, "--dtype", "float32"),
            ),
            environment={**os.environ, **sglang_server.ENVIRONMENT},
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
    updates: ServerUpdates = "files",
) -> SglangDialect:
    model = ServedModel(architecture="Qwen2ForCausalLM", vocabulary=vocabulary)
    return SglangDialect(client, model=model, stale_cache=stale_cache, updates=updates)


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


def check_sent(
    served: Served, updates: ServerUpdates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights come in buckets, from each client in turn. One that fails, because the server refuses
    a tensor, and one that is lost without a word leave nothing that is in the way of the next."""
    monkeypatch.setattr(SglangSender, "bucket_bytes", 20_000)
    send = SglangTensors._send

    async def lost(sender: SglangTensors, *bucket: Any) -> None:
        if bucket[-1].get("weight_version") == "3.1":
            raise RunFailedError("lost without a word")
        await send(sender, *bucket)

    monkeypatch.setattr(SglangTensors, "_send", lost)  # a tensor that it refuses ends the server
    other = with_another_shape(served.versions["2.1"], tmp_path / "other")
    versions = {**served.versions, "3.1": other}
    speakers: list[SglangDialect] = []

    async def load(*names: str) -> None:
        speaker = dialect(HttpClient(Address(f"unix:{served.socket}")), updates=updates)
        speakers.append(speaker)
        for name, made in await load_in_turn(speaker, versions, *names):
            check(versions[name], PROMPT, made)

    async def close() -> None:
        for speaker in speakers:
            await speaker.close()

    try:
        served.loop.run(load("2.1", "1.1", "2.1"))
        with pytest.raises(RunFailedError, match=r"from_distributed: .*Failed to update|lost"):
            served.loop.run(load("1.1", "3.1"))
        served.loop.run(load("1.1"))
    finally:
        served.loop.run(close())
