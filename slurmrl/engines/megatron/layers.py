"""Our own modules in megatron's layers: norms, packed attention, and products.

T packed tokens, c ranks along the context axis, H query heads and Hkv key and value heads on this
rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

from slurmrl.engines.megatron.packing import Packed
from slurmrl.engines.megatron.place import Stage
from slurmrl.engines.megatron.routing import Router
from slurmrl.models.config import ModelConfig
from slurmrl.models.norm import RMSNorm
from slurmrl.models.recompute import Recompute, keeping_products, recomputed
from slurmrl.tensors.ops.attention import packed_attention
from slurmrl.tensors.ops.collectives import exchange
from slurmrl.tensors.ops.gated import gated_halves
from slurmrl.tensors.ops.rotary import rotate


class Norm(RMSNorm):
    """The norm of the built-in decoder with the constructor and marks that megatron expects."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        offset: bool,
        device: torch.device,
    ) -> None:
        super().__init__(hidden_size, eps, offset=offset)
        self.weight = nn.Parameter(self.weight.detach().to(device, config.params_dtype))
        # Each rank sees its own tokens only, so gradients must be summed.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class PackedAttention(nn.Module):
    """Rotation and attention within each sequence. Along the context axis tokens are exchanged
    for heads before, and back afterwards (Jacobs et al. 2023, DeepSpeed Ulysses)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: Any,
        windows: tuple[int | None, ...],
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = float(config.kv_channels) ** -0.5
        self.window = windows[layer_number - 1]
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        """query [T/c, H, D]; key, value [T/c, Hkv, D] -> [T/c, H, D]."""
        packing, rotation = packed_seq_params.packing, packed_seq_params.rotation
        assert packing is not None
        assert rotation is not None
        ranks = self.group.size()
        if ranks > 1:
            query, key, value = self._heads(query, key, value, ranks)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        out = packed_attention(query, key, value, packing, self.scale, self.window)
        if ranks == 1:
            return out
        parts = exchange(out.view(ranks, -1, *out.shape[1:]), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, ...]:
        """All tokens of this rank's share of the heads; too few key heads are copied."""
        shared = query.shape[1] // key.shape[1]
        if key.shape[1] % ranks:
            key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        return tuple(
            exchange(x.view(x.shape[0], ranks, -1, x.shape[2]).transpose(0, 1), self.group).flatten(
                0, 1
            )
            for x in (query, key, value)
        )


class SelectiveLayer(TransformerLayer):  # type: ignore[misc]
    """Keeps the same activations as the built-in decoder's ``selective``. (megatron's own selection
    drops only the attention scores, which a fused attention never stores.)"""

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super()._forward_attention(*args, **kwargs)
        return keeping_products(super()._forward_attention, *args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super()._forward_mlp(*args, **kwargs)
        # Experts are computed again to the end, because their collectives must run on every rank,
        # whatever tokens it has.
        with set_checkpoint_early_stop(not self.is_moe_layer):
            return recomputed(super()._forward_mlp, *args, **kwargs)


class RowProduct(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel product whose input is saved before it is computed (megatron's own saves it
    afterwards), so that a recomputation can end before the product."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return F.linear(input, weight)


class GatedHalves(nn.Module):
    """The gated product of the halves of a first linear layer's outputs. (megatron's own form keeps
    three tensors of the inner size more.)"""

    def __init__(self, config: TransformerConfig, *, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 2i] -> [..., i]."""
        product = gated_halves(x.flatten(0, -2), self.activation)
        return product.view(*x.shape[:-1], product.shape[1])


@dataclass(frozen=True)
class Modules:
    """The module classes of layers."""

    layer: type
    norm: ModuleSpec
    head_norm: ModuleSpec
    """The norm of queries and keys."""
    column: type
    row: type
    experts: ModuleSpec
    activation: ModuleSpec | None = None
    """Of dense layers; None for megatron's own."""
    router: Callable[..., Router] = Router


def own_modules(config: ModelConfig, device: torch.device, recompute: Recompute) -> Modules:
    """Norms of the built-in decoder, megatron's linear layers, one expert after the other."""
    activation = ModuleSpec(GatedHalves, {"activation": config.activation})
    matrices = MLPSubmodules(ColumnParallelLinear, activation, RowProduct)
    return Modules(
        layer=SelectiveLayer if recompute == "selective" else TransformerLayer,
        norm=ModuleSpec(Norm, {"offset": config.family.norm_offset, "device": device}),
        # (q and k norms have no offset in any family)
        head_norm=ModuleSpec(Norm, {"offset": False, "device": device}),
        column=ColumnParallelLinear,
        row=RowProduct,
        experts=ModuleSpec(SequentialMLP, submodules=matrices),
        activation=activation,
    )


def block_spec(config: ModelConfig, stage: Stage, modules: Modules) -> TransformerBlockSubmodules:
    """The layers of one chunk."""
    layers = range(stage.first_layer, stage.first_layer + stage.layers)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, layer, modules) for layer in layers], layer_norm=modules.norm
    )


def _layer(config: ModelConfig, layer: int, modules: Modules) -> ModuleSpec:
    attention = SelfAttentionSubmodules(
        linear_qkv=modules.column,
        core_attention=partial(PackedAttention, windows=config.windows),
        linear_proj=modules.row,
        q_layernorm=modules.head_norm if config.qk_norm else IdentityOp,
        k_layernorm=modules.head_norm if config.qk_norm else IdentityOp,
    )
    return ModuleSpec(
        modules.layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=ModuleSpec(
                SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=_feed_forward(config, layer, modules),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _feed_forward(config: ModelConfig, layer: int, modules: Modules) -> ModuleSpec:
    if config.moe is not None and layer in config.moe.layers:
        parts = MoESubmodules(experts=modules.experts, router=modules.router)
        return ModuleSpec(MoELayer, submodules=parts)
    matrices = MLPSubmodules(modules.column, modules.activation, modules.row)
    return ModuleSpec(MLP, submodules=matrices)
