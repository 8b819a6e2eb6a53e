"""Activation checkpointing: which activations of a layer are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slurmrl.models.attention import AttentionCore
from slurmrl.models.rotary import Rotation
from slurmrl.ops import flash

Recompute = Literal["off", "selective", "full"]
"""``full`` keeps only a layer's input; ``selective`` also the results of matrix products and
attention, so that only cheap operations are repeated."""
LayerCall = Callable[[nn.Module, Tensor, Rotation | None, AttentionCore], Tensor]

CHECKPOINT_OPTIONS: Mapping[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Layers draw no random numbers, because decoders have no dropout."""
KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
)


def layer_call(mode: Recompute) -> LayerCall:
    """How to call a layer. Without gradients nothing is kept in any mode."""
    if mode == "off" or not torch.is_grad_enabled():
        return plain
    return _full if mode == "full" else selective


def plain(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    out: Tensor = layer(x, rotation, core)
    return out


def unhooked(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    """For generation: a sharded engine gathers all parameters once, and its hooks on a layer
    would reshard them after each step."""
    out: Tensor = layer.forward(x, rotation, core)
    return out


def _full(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    out: Tensor = checkpoint(layer, x, rotation, core, **CHECKPOINT_OPTIONS)
    return out


def selective(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with checkpointing; the backward pass recomputes everything except ``KEPT``."""
    contexts = partial(create_selective_checkpoint_contexts, _kept_operators())
    return checkpoint(call, *args, context_fn=contexts, **CHECKPOINT_OPTIONS, **kwargs)


@cache
def _kept_operators() -> list[torch._ops.OpOverload]:
    """The operators of KEPT that are installed."""
    flash.register()
    operators = []
    for name in KEPT:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            operators += [getattr(packet, overload) for overload in packet.overloads()]
    return operators
