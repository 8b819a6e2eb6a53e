"""Activation checkpointing: which activations of a layer are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from slurmrl.models.layer_parts import AttentionCore, Rotation
from slurmrl.tensors.ops import attention

Recompute = Literal["off", "selective", "full"]
"""Activation checkpointing of a layer. ``full`` keeps only the layer's input. ``selective`` also
keeps queries, keys, values, the result of attention and the input of the feed-forward half.
``selective`` recomputes the feed-forward half, which has most of a layer's activations."""
LayerCall = Callable[[nn.Module, Tensor, Rotation | None, AttentionCore], Tensor]

CHECKPOINT_OPTIONS: Mapping[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Options of torch's checkpointing. Random states need not be kept, because there is no dropout."""
PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "slurmrl::ring_attention",
    "slurmrl::sink_attention",
)


def layer_call(mode: Recompute) -> LayerCall:
    """Return a function that calls a layer. Layers implement ``selective`` themselves."""
    return recomputed if mode == "full" and torch.is_grad_enabled() else plain


def plain(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    out: Tensor = layer(x, rotation, core)
    return out


def unhooked(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    """Call a layer without its hooks, for generation.

    A sharded engine gathers all parameters once; its hooks would reshard them after each step.
    """
    out: Tensor = layer.forward(x, rotation, core)
    return out


def recomputed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with activation checkpointing.

    The backward pass calls the function again, up to the last tensor that it needs.
    """
    return checkpoint(call, *args, **CHECKPOINT_OPTIONS, **kwargs)


def keeping_products(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as `recomputed` does, but keep attention's result and earlier products."""
    contexts = partial(create_selective_checkpoint_contexts, _KeepingPolicy())
    return checkpoint(call, *args, context_fn=contexts, **CHECKPOINT_OPTIONS, **kwargs)


class _KeepingPolicy:
    """Decides which results of one call are kept.

    The product after attention is not kept, because the backward pass does not need it.
    """

    def __init__(self) -> None:
        self._attended: set[bool] = set()
        """Passes in which attention has run: False for the call, True for the recomputation."""

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        kept = operator in _operators(ATTENTION)
        if kept:
            self._attended.add(context.is_recompute)
        elif operator in _operators(PRODUCTS):
            kept = context.is_recompute not in self._attended
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _operators(names: tuple[str, ...]) -> frozenset[torch._ops.OpOverload]:
    """Return the operators among ``names`` that are installed."""
    attention.register_flash()
    operators: set[torch._ops.OpOverload] = set()
    for name in names:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            operators.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(operators)
