"""The bytes of recorded experts: in samples, on GPUs that replay them, and in servers.

With ``rollout.replay_experts`` each token also has the numbers of its experts in each layer that
has some. Engines need further forms of these records while they compute a micro-batch.
"""

from __future__ import annotations

from typing import Final

from slurmrl.config.allocation import Allocation
from slurmrl.plan.estimates.shape import ModelShape

NUMBER: Final = 2
"""Bytes of the number of an expert in a sample and in the built-in engine's cache: int16."""
REPLAYED: Final = 8
"""Bytes of the number of an expert that the built-in decoder replays: int64."""
SERVED: Final = 4
"""Bytes of the number of an expert in SGLang's host memory: int32."""


def numbers(shape: ModelShape) -> int:
    """Experts of a token in all layers."""
    return shape.expert_layers * shape.experts_per_token


def replayed(
    shape: ModelShape, allocation: Allocation, *, batch: int, micro: int, layers: float
) -> int:
    """Return the bytes on a GPU of replayed experts while a model computes.

    They hold records of ``batch`` tokens, a copy of the records of a micro-batch, and the engine's
    own form of it. ``micro`` is the tokens of a micro-batch on one context rank; each rank has the
    record of all of them. ``layers`` is the layers of a stage times the micro-batches that are on
    their way through it.

    megatron's routers have a mask with a byte for each token, layer and expert.
    """
    whole = micro * allocation.sizes["cp"]
    size: float = NUMBER * numbers(shape) * (max(batch, whole) + whole)
    if allocation.backend == "megatron":
        share = shape.expert_layers / shape.layers
        return round(size + micro * layers * share * shape.experts)
    return round(size + REPLAYED * numbers(shape) * (whole + micro))


def beside_cache(shape: ModelShape) -> int:
    """Return the bytes of a token in the cache of the built-in engine."""
    return NUMBER * numbers(shape)


def on_host_of_server(shape: ModelShape, tokens: float) -> int:
    """Return the page-locked host memory in bytes of each tensor rank of an SGLang server.

    It holds the experts of all layers, dense ones included, for each of the ``tokens`` that the
    server's cache of keys and values takes.
    """
    return round(SERVED * shape.layers * shape.experts_per_token * tokens)
