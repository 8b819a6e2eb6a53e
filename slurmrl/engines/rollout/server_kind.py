"""The contract of the kinds of servers: how one is started for a model, and kept."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slurmrl.checkpoint.export import write_json
from slurmrl.config.servers import Address
from slurmrl.engines.rollout.dialect import Dialect
from slurmrl.engines.rollout.fitness import ServedModel
from slurmrl.engines.rollout.http import HttpClient
from slurmrl.engines.rollout.kept import KeptEngine
from slurmrl.engines.rollout.process import ServerProgram
from slurmrl.engines.rollout.server import Running, Serving
from slurmrl.engines.rollout.weight_checks import WeightChecks
from slurmrl.fsio.calls import REAL
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf import CONFIG_FILE

DROPPED = (
    *("PYTHONPATH", "PYTHONHOME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"),
    "TORCHINDUCTOR_DETERMINISTIC",
)
"""Variables of a worker that mean something else to a server, or that its engine needs alone: a
server cannot free memory of expandable segments."""
SOCKET = "server.sock"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ServerKind(ABC):
    """Servers of one kind for one model."""

    name: str

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        serving: Serving | Running,
        *,
        tensor_ranks: int,
        device: torch.device,
    ) -> None:
        """``tensor_ranks``: GPUs that share the model, of which ``device`` is one."""
        self.config, self.dtype, self.serving = config, dtype, serving
        self.tensor_ranks, self.device = tensor_ranks, device
        self.model = ServedModel.of(config, dtype, text=serving.text, experts=serving.experts)
        self.checks = WeightChecks(device, own=isinstance(serving, Serving))
        self.stale_cache = isinstance(serving, Serving) and serving.stale_cache

    @abstractmethod
    def command(self, serving: Serving, model: Path, socket: Path) -> Sequence[str]:
        """The command that starts a server without weights, over ``tensor_ranks`` GPUs."""

    @abstractmethod
    def memory_flags(self, share: int, free: int, total: int) -> Sequence[str]:
        """Arguments with which a server uses ``share`` bytes of each GPU, of which ``free`` of
        ``total`` are free when it starts."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables of the server, over those of this process."""

    @abstractmethod
    def dialect(self, client: HttpClient, control: HttpClient | None = None) -> Dialect:
        """How to speak to it. Log-probabilities are under the distribution over all tokens."""

    def keep(self, serving: Serving, folder: Path, *, name: str, visible: str) -> KeptEngine:
        """Start a server and keep it. Call this in a running asyncio loop.

        ``folder`` is of this process alone, with mode 0700: it gets the server's socket and its
        temporary files. ``visible``: CUDA_VISIBLE_DEVICES of the server.
        """
        model, temporary = folder / "model", folder / "tmp"
        for each in (model, temporary):
            each.mkdir(mode=0o700)
        write_json(model / CONFIG_FILE, weights_config(self.config, self.dtype), REAL)
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        own = {"TMPDIR": str(temporary), VISIBLE: visible}
        program = ServerProgram(
            name=name,
            command=self.command(serving, model, folder / SOCKET),
            environment={**inherited, **own, **self.environment()},
            log=serving.log,
            more=partial(self._share_of_memory, serving.memory_bytes),
            events=serving.events,
        )
        address = Address(f"unix:{folder / SOCKET}")
        return KeptEngine(
            program, address, self.dialect, patience=serving.patience, context=serving.context
        )

    def _share_of_memory(self, share: int | None) -> Sequence[str]:
        if share is None:
            return ()
        torch.cuda.empty_cache()
        return self.memory_flags(share, *torch.cuda.mem_get_info(self.device))


def weights_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of weights that servers load, without the model's stop tokens: a request
    has its own."""
    return {**config.to_hf(head="lm", dtype=dtype), "eos_token_id": None}
