"""Modules in megatron's layers, from slurmrl or from TransformerEngine.

slurmrl has norms, packed attention and products. TransformerEngine has linear layers, norms and
grouped experts. Attention is always slurmrl's: sequences are packed, and along the context axis
ranks exchange heads or pass keys on.

There are T packed tokens, S sequences and c context-parallel ranks. This rank has H query heads and
Hkv key and value heads of size D. Ranks along the context axis hold equal parts of the packed
tokens, and a separate last sequence is padding. Attention sees whole sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_te_version, is_te_min_version
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import set_checkpoint_early_stop

from slurmrl.engines.megatron.latent_layer import LatentSelfAttention
from slurmrl.engines.megatron.parts import Stage
from slurmrl.engines.megatron.routers import Router
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Clamp, ModelConfig, MoE
from slurmrl.models.experts import UNKNOWN, clamped_product
from slurmrl.models.layer_parts import (
    RMSNorm,
    RotaryTable,
    Rotation,
    heads_of_all_tokens,
    tokens_of_all_heads,
)
from slurmrl.models.packed import inverse, length_order, packed_positions
from slurmrl.models.parallel.split import Axis
from slurmrl.models.recompute import Recompute, keeping_products, recomputed
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.elementwise import gated_halves, rotate
from slurmrl.tensors.ops.ring_attention import ring_attention, zigzag
from slurmrl.tensors.ops.sampling import SamplingMasks
from slurmrl.tensors.ops.sink_attention import causal_attention

FIRST, END = "2.9.0a0", "2.12"
"""First TransformerEngine that megatron-core 0.16.1 supports, and the first that is too new."""
HINT = f"pip install --no-build-isolation 'transformer_engine[pytorch]>={FIRST},<{END}'"


class Norm(RMSNorm):
    """The built-in decoder's norm, with the constructor and attributes that megatron expects."""

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
        # With sequence parallelism, each rank has only its own tokens, so gradients are summed.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


class PackedAttention(nn.Module):
    """Rotation and attention within each sequence.

    Ranks along the context axis exchange tokens for heads before attention, and heads for tokens
    after it. If heads cannot be divided equally, the ranks pass keys and values on instead.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        pg_collection: Any,
        windows: tuple[int | None, ...],
        scale: float,
        sinks: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.sinks = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
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
        """Map ``query`` [T/c, H, D] and ``key``, ``value`` [T/c, Hkv, D] to outputs [T/c, H, D]."""
        packing, rotation = packed_seq_params.packing, packed_seq_params.rotation
        assert packing is not None
        assert rotation is not None
        ranks = self.group.size()
        if packed_seq_params.bounds is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
            bounds, tokens = packed_seq_params.bounds, query.shape[0]
            kind = (bounds, tokens, self.group, self.scale, self.window, self.sinks)
            return ring_attention(query, key, value, *kind)
        sinks = self.sinks
        if ranks > 1:
            query, key, value = heads_of_all_tokens(query, key, value, self.group)
            sinks = None if sinks is None else sinks.chunk(ranks)[self.group.rank()]
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        out = causal_attention(query, key, value, packing, self.scale, self.window, sinks)
        return out if ranks == 1 else tokens_of_all_heads(out, self.group)


class SelectiveLayer(TransformerLayer):  # type: ignore[misc]
    """Layer that keeps the same activations as the built-in decoder's ``recompute: selective``.

    (megatron's own selection drops only attention scores, which fused attention never stores.)
    """

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super()._forward_attention(*args, **kwargs)
        return keeping_products(super()._forward_attention, *args, **kwargs)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super()._forward_mlp(*args, **kwargs)
        # Recompute experts without an early stop, because every rank must run their collectives.
        with set_checkpoint_early_stop(not self.is_moe_layer):
            return recomputed(super()._forward_mlp, *args, **kwargs)


class RowProduct(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel product that saves its input before it computes.

    Recomputation can then stop before the product. (megatron's own product saves its input at the
    end.)
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return F.linear(input, weight)


class WholeExpertRow(RowProduct):
    """A row-parallel product of experts that are not split.

    megatron adds the bias to the output in place. The output must therefore not be a view; a
    collective of one rank would return a view. Tensor ranks must not sum gradients of the bias:
    either their experts differ, or their tokens, over which the experts' data axis sums.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.explicit_expert_comm = True
        bias: nn.Parameter = self.bias
        vars(bias)["sequence_parallel"] = False


class GatedHalves(nn.Module):
    """The gated product of the two halves of a linear layer's outputs.

    (megatron's own module keeps three more tensors of the inner size.)
    """

    def __init__(self, config: TransformerConfig, *, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., 2i] to the gated product [..., i]."""
        product = gated_halves(x.flatten(0, -2), self.activation)
        return product.view(*x.shape[:-1], product.shape[1])


class ClampedGates(nn.Module):
    """The gated product of clamped experts, whose first layer interleaves gates and values."""

    def __init__(self, config: TransformerConfig, *, clamp: Clamp) -> None:
        super().__init__()
        self.clamp = clamp

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., 2i] to the gated product [..., i]."""
        return clamped_product(x, self.clamp)


@dataclass(frozen=True)
class Modules:
    """The module classes of a model's layers."""

    layer: type
    norm: ModuleSpec
    head_norm: ModuleSpec
    """The norm of queries and keys."""
    column: type
    row: type
    experts: ModuleSpec
    activation: ModuleSpec | None = None
    """Activation module of dense layers; None for megatron's own module."""
    router: Callable[..., Router] = Router


def own_modules(config: ModelConfig, device: torch.device, recompute: Recompute) -> Modules:
    """Return norms of the built-in decoder, megatron's linear layers and ungrouped experts."""
    activation = ModuleSpec(GatedHalves, {"activation": config.activation})
    matrices = MLPSubmodules(ColumnParallelLinear, activation, RowProduct)
    if config.moe is not None and config.moe.clamp is not None:
        gates = ModuleSpec(ClampedGates, {"clamp": config.moe.clamp})
        matrices = MLPSubmodules(ColumnParallelLinear, gates, WholeExpertRow)
    return Modules(
        layer=SelectiveLayer if recompute == "selective" else TransformerLayer,
        norm=ModuleSpec(Norm, {"offset": config.family.norm_offset, "device": device}),
        # The norms of queries and keys have no offset in any family.
        head_norm=ModuleSpec(Norm, {"offset": False, "device": device}),
        column=ColumnParallelLinear,
        row=RowProduct,
        experts=ModuleSpec(SequentialMLP, submodules=matrices),
        activation=activation,
    )


def block_spec(config: ModelConfig, stage: Stage, modules: Modules) -> TransformerBlockSubmodules:
    """Return the specification of one chunk's layers."""
    layers = range(stage.first_layer, stage.first_layer + stage.layers)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(config, layer, modules) for layer in layers], layer_norm=modules.norm
    )


def _layer(config: ModelConfig, layer: int, modules: Modules) -> ModuleSpec:
    options: dict[str, Any] = {"windows": config.windows, "scale": config.score_scale}
    core = partial(PackedAttention, **options, sinks=config.family.sinks)
    parts = SelfAttentionSubmodules(
        linear_qkv=modules.column,
        core_attention=core,
        linear_proj=modules.row,
        q_layernorm=modules.head_norm if config.qk_norm else IdentityOp,
        k_layernorm=modules.head_norm if config.qk_norm else IdentityOp,
    )
    attention = ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, parts)
    if config.latent is not None:
        kinds = {"column": modules.column, "row": modules.row, "norm": modules.head_norm}
        attention = ModuleSpec(LatentSelfAttention, {"model": config, "core": core, **kinds})
    return ModuleSpec(
        modules.layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm,
            mlp=_feed_forward(config, layer, modules),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _feed_forward(config: ModelConfig, layer: int, modules: Modules) -> ModuleSpec:
    matrices = MLPSubmodules(modules.column, modules.activation, modules.row)
    if config.moe is not None and layer in config.moe.layers:
        parts = MoESubmodules(
            experts=modules.experts,
            shared_experts=ModuleSpec(SharedExpertMLP, submodules=matrices),
            router=partial(modules.router, moe=config.moe),
        )
        return ModuleSpec(MoELayer, submodules=parts)
    return ModuleSpec(MLP, submodules=matrices)


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """A micro-batch's offsets and rotation, which attention needs."""

    packing: Packing | None = None
    rotation: Rotation | None = None
    """The rotation of all tokens; with ``bounds``, only of this rank's tokens."""
    bounds: list[int] | None = None
    """Boundaries of the sequences if ranks pass keys and values on; None if they do not."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch: sequences in the order of their lengths, then padding."""

    ids: Tensor
    """[T + padding]: token ids."""
    cu_seqlens: Tensor
    """Offsets of the sequences, in host memory; the padding is a separate sequence."""
    places: Tensor
    """[T + padding]: place of each token among these sequences, in host memory."""
    back: Tensor
    """[T]: index in ``ids`` of each token of the sample."""
    params: Packed
    real: Tensor | None = None
    """[T + padding]: whether a token belongs to the batch; None if routers need no mask."""
    masks: SamplingMasks | None = None
    """Sampling masks of T + padding tokens; None if all were sampled from the whole vocabulary."""
    experts: Tensor | None = None
    """[T + padding, L, K]: recorded experts in the blocks that have experts; None: no record."""


def micro_batch(
    ids: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    multiple: int,
    rotary: RotaryTable,
    dtype: torch.dtype,
    masks: SamplingMasks | None = None,
    experts: Tensor | None = None,
    ring: Axis | None = None,
) -> Micro:
    """Return a micro-batch of ``ids`` [T], padded to a multiple of ``multiple`` tokens.

    ``cu_seqlens`` [S+1] int32 is in host memory. ``ring`` is the context axis if its ranks pass
    keys and values on; tokens are then in the ring's order.
    """
    tokens = ids.shape[0]
    order, cu_sorted = length_order(cu_seqlens, tokens)
    padding = -tokens % multiple
    if padding:
        cu_sorted = torch.cat((cu_sorted, cu_sorted[-1:] + padding))
    total = tokens + padding
    places = torch.arange(total)
    if ring is not None:
        places = zigzag(total, total // ring.size, ring.size)
    order = torch.cat((order, torch.arange(tokens, total)))[places]
    positions = packed_positions(cu_sorted, total)[places]
    if ring is not None:
        positions = positions.chunk(ring.size)[ring.rank]
    back = inverse(order)[:tokens]
    order, back, positions = upload((order, back, positions), ids.device)
    params = Packed(
        qkv_format="thd",
        packing=Packing(cu_sorted, max(longest, padding)),
        rotation=rotary.rotation(positions, dtype),
        bounds=None if ring is None else cu_sorted.tolist(),
    )
    drawn_from = None if masks is None else masks.padded(padding).at(order)
    if experts is not None:
        unknown = experts.new_full((padding, *experts.shape[1:]), UNKNOWN)
        experts = torch.cat((experts, unknown))[order]
    padded = torch.cat((ids, ids.new_zeros(padding)))[order]
    return Micro(padded, cu_sorted, places, back, params, masks=drawn_from, experts=experts)


def uses_te(wanted: bool | None, device: torch.device, dtype: str, moe: MoE | None = None) -> bool:
    """Return whether layers use TransformerEngine's modules.

    If ``wanted`` is None, layers use installed modules on GPUs in half precision (in float32 they
    would compute in TF32). Raises UsageError if the modules are wanted and missing, or cannot be
    used.
    """
    if moe is not None and moe.clamp is not None:
        if wanted:
            raise UsageError(
                "transformer_engine: true does not support clamped experts; remove the setting"
            )
        return False
    if wanted is None:
        return device.type == "cuda" and dtype != "float32" and te.HAVE_TE and _suits()
    if wanted and not te.HAVE_TE:
        raise UsageError(f"transformer_engine: true needs TransformerEngine: {HINT}")
    return wanted


def _suits() -> bool:
    if is_te_min_version(FIRST) and not is_te_min_version(END):
        return True
    warnings.warn(
        f"TransformerEngine {get_te_version()} is not used: megatron-core supports "
        f">={FIRST},<{END}; set transformer_engine: true to use it anyway",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def te_modules() -> Modules:
    """Return TransformerEngine's module classes for layers."""
    norm = ModuleSpec(te.TENorm)
    grouped = MLPSubmodules(
        linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear
    )
    return Modules(
        layer=TransformerLayer,
        norm=norm,
        head_norm=norm,
        column=te.TEColumnParallelLinear,
        row=te.TERowParallelLinear,
        experts=ModuleSpec(TEGroupedMLP, submodules=grouped),
    )
