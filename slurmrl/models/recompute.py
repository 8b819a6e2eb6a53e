"""Activation checkpointing: what of a layer is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slurmrl.models.attention import AttentionCore
from slurmrl.models.rotary import Rotation
from slurmrl.ops import flash

Recompute = Literal["off", "selective", "full"]
"""``full`` keeps a layer's input alone; ``selective`` the results of matrix products and
attention as well, so that only cheap operations are done again."""
LayerCall = Callable[[nn.Module, Tensor, Rotation | None, AttentionCore], Tensor]

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
    """How to call a layer; without gradients nothing is kept anyway."""
    if mode == "off" or not torch.is_grad_enabled():
        return plain
    return _full if mode == "full" else selective


def plain(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    out: Tensor = layer(x, rotation, core)
    return out


def unhooked(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    """For generation: a sharded engine gathers all parameters once, and its hooks on a layer
    would give them back after each step."""
    out: Tensor = layer.forward(x, rotation, core)
    return out


def _full(layer: nn.Module, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
    out: Tensor = checkpoint(layer, x, rotation, core, use_reentrant=False)
    return out


def selective(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` returns; its backward pass computes all again but ``KEPT``."""
    contexts = partial(create_selective_checkpoint_contexts, _kept_operators())
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@cache
def _kept_operators() -> list[torch._ops.OpOverload]:
    """Those of KEPT that this installation has."""
    flash.register()
    found = []
    for name in KEPT:
        namespace, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found
