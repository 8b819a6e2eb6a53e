"""A server of an engine. The classes of a trial start it and send its requests."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from slurmrl.config.schema.rollout import Address
from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import SOCKET, ServerKind, Serving
from slurmrl.rollouts.generation.sglang import SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer

KINDS: dict[str, type[ServerKind]] = {"sglang": SglangServer, "vllm": VllmServer}
SILENCE_S = 600.0
"""Seconds without an answer after which the server counts as hung. It may share its CPU."""


class BenchServer:
    """One server without a GPU, in float32. Create it in a running asyncio loop."""

    def __init__(
        self, engine: str, python: str, model: ModelConfig, *, arguments: tuple[str, ...] = ()
    ) -> None:
        """``python`` belongs to the engine's environment; ``arguments`` are additional."""
        self._logs = tempfile.TemporaryDirectory(prefix="slurmrl-bench-")
        serving = Serving(
            python=python,
            arguments=arguments,
            tokenizer=None,
            patience=Patience(silence_s=SILENCE_S),
            log=Path(self._logs.name) / f"{engine}.log",
        )
        cpu = torch.device("cpu")
        self.kind = KINDS[engine](model, "float32", serving, tensor_ranks=1, device=cpu)
        self.server = self.kind.servers(name=engine, visible="")
        self.folder = self.server.folder
        self.address = Address(f"unix:{self.folder / SOCKET}")

    async def close(self) -> None:
        await self.server.close()
        self._logs.cleanup()
