"""The modules of our own in megatron's layers: norms, and attention over packed sequences.

T packed tokens, c ranks along the context axis, H query heads and Hkv key and value heads on this
rank, D head size.
"""

from __future__ import annotations

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

from slurmrl.engines.megatron.packing import Packed
from slurmrl.engines.megatron.place import Stage
from slurmrl.models.config import ModelConfig
from slurmrl.models.norm import RMSNorm
from slurmrl.ops.attention import packed_attention
from slurmrl.ops.collectives import exchange
from slurmrl.ops.rotary import rotate


class Norm(RMSNorm):
    """The norm of the built-in decoder, as megatron makes and marks one."""

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
        # Each rank sees its own tokens only, so gradients are added up.
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


def block_spec(
    config: ModelConfig, stage: Stage, device: torch.device
) -> TransformerBlockSubmodules:
    """The layers of one chunk."""
    norm = ModuleSpec(Norm, {"offset": config.family.norm_offset, "device": device})
    layers = range(stage.first_layer, stage.first_layer + stage.layers)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, layer, norm) for layer in layers], layer_norm=norm
    )


def _layer(config: ModelConfig, layer: int, norm: ModuleSpec) -> ModuleSpec:
    # (q and k norms have no offset in any family)
    head_norm = ModuleSpec(Norm, {**norm.params, "offset": False})
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=partial(PackedAttention, windows=config.windows),
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm if config.qk_norm else IdentityOp,
        k_layernorm=head_norm if config.qk_norm else IdentityOp,
    )
    sparse = config.moe is not None and layer in config.moe.layers
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts() if sparse else ModuleSpec(MLP, submodules=_matrices()),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _matrices() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _experts() -> ModuleSpec:
    experts = ModuleSpec(SequentialMLP, submodules=_matrices())
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=experts))
