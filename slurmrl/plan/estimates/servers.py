"""The GPU memory that a server needs, and what it gets in a rollout task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slurmrl.plan.engine_rules import last_value
from slurmrl.plan.estimates.hardware import GIB, margin
from slurmrl.plan.estimates.memory import Memory

SLEEPING: Final = 2 * GIB
"""Kept on each GPU by a server that sleeps: CUDA contexts, NCCL's buffers, code."""
LEAST_COMPUTING: Final = 2 * GIB
SHARES: Final = ("--mem-fraction-static", "--gpu-memory-utilization")
"""Arguments that set what a server uses of a GPU."""


def computing(gpu_bytes: int) -> int:
    """Bytes that a server needs beside weights and caches: activations of the prompts that it reads
    at a time, logits, CUDA graphs. SGLang and vLLM choose their batches by the GPU's size."""
    return max(LEAST_COMPUTING, gpu_bytes // 10)


def least(memory: Memory, gpu_bytes: int) -> int:
    """Bytes of a GPU without which a server cannot serve the longest sequence."""
    return memory.weights + memory.sequence + computing(gpu_bytes)


def share_in_task(arguments: Sequence[str], gpu_bytes: int) -> int:
    """Bytes of each GPU that a server uses which has them to itself, and needs no room for weights
    that arrive: all but a margin, or the share that the user's arguments set."""
    own = own_share(arguments)
    return gpu_bytes - margin(0) if own is None else round(own * gpu_bytes)


def own_share(arguments: Sequence[str]) -> float | None:
    """The part of a GPU that the user's arguments give a server; None if they set none."""
    value = last_value(arguments, SHARES)
    try:
        return None if value is None else float(value)
    except ValueError:
        return None  # the server refuses it
