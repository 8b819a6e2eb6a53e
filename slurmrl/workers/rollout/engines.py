"""The engines of rollout tasks: the decoder of their own process, or a server that they keep.

A new kind of server needs nothing here: its engine in ``ENGINES`` names it (`ServerEngine.kind`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from slurmrl.engines import ENGINES
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.parallel.split import WHOLE, Axis, Split
from slurmrl.plan.estimates.servers import own_share, share_in_task
from slurmrl.plan.model import ModelPlan
from slurmrl.plan.settings import Settings
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.generation.native.peers import Peers
from slurmrl.rollouts.generation.native.rollout import NativeRollout
from slurmrl.rollouts.generation.native.schedule import Limits
from slurmrl.rollouts.generation.native.stops import Decode
from slurmrl.rollouts.generation.servers import VISIBLE, ServerKind
from slurmrl.run.events import EventWriter
from slurmrl.workers.serving import own_server

MakeEngine: TypeAlias = Callable[[Path], RolloutEngine]
"""Makes an engine without weights, in a running asyncio loop. It gets a folder of this task alone
(mode 0700) in the host's memory."""


def native(
    settings: Settings, decoder: Decoder, decode: Decode, peers: Peers | None = None
) -> NativeRollout:
    """``decoder``: with any weights, in ``actor.dtype``; ``decode``: for stop strings; ``peers``:
    the ranks of a decoder that is split."""
    config = settings.config
    rows, memory = config.rollout.episode.concurrency, config.rollout.episode.cache_bytes
    tokens = max(rows, config.actor.max_tokens_per_microbatch)
    limits = Limits(rows=rows, step_tokens=tokens, cache_bytes=memory)
    tasks = config.rollout.tasks
    assert tasks is not None, "an engine of rollout tasks"
    return NativeRollout(
        decoder, limits=limits, decode=decode, peers=peers, stale_cache=tasks.stale_cache
    )


def served(
    settings: Settings,
    model: ModelPlan,
    config: ModelConfig,
    device: torch.device,
    log: Path,
    events: EventWriter,
) -> MakeEngine:
    """A server on all GPUs of this worker, of which ``device`` is one, that writes to ``log``. Its
    ends are told in ``events``."""
    serving = own_server(settings, log, events, memory_bytes=_share(settings, device))
    make: type[ServerKind] = ENGINES.load(model.engine).kind
    size = model.sizes["tp"]
    kind = make(config, settings.config.actor.dtype, serving, tensor_ranks=size, device=device)
    visible = os.environ.get(VISIBLE, "")
    return lambda folder: kind.keep(serving, folder, name=f"{kind.name} server", visible=visible)


def undefined_decoder(
    config: ModelConfig, dtype: str, target: torch.device, peers: Peers | None = None
) -> Decoder:
    """A model with undefined weights, or this rank's part of it."""
    split = WHOLE
    if peers is not None:
        split = Split(Axis(peers.group.rank(), peers.group.size(), peers.group))
    with torch.device("meta"):
        decoder = build(config, split=split).to(getattr(torch, dtype))
    decoder.to_empty(device=target)
    decoder.requires_grad_(False)
    return decoder


def _share(settings: Settings, device: torch.device) -> int | None:
    """Bytes of each GPU for the server; None if its own settings decide."""
    arguments = settings.config.rollout.server_args
    if device.type != "cuda" or own_share(arguments) is not None:
        return None
    total: int = torch.cuda.get_device_properties(device).total_memory
    return share_in_task(arguments, total)
