"""Functions that generate with a built-in decoder in few calls of torch.

One product computes the outputs of all matrices that read the same input. These matrices therefore
are side by side in memory (``join_matrices``). On a CPU, small models are copied into a form with
faster products. Parts that have no such function are called as modules.

Shapes: T packed tokens, Hq query heads, Hkv key and value heads, D head size, h hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.decoder import Decoder, ResidualLayer
from slurmrl.models.latent_attention import LatentAttention
from slurmrl.models.layer_parts import Attention, AttentionSpec, GatedMLP, RMSNorm, Rotation
from slurmrl.models.parallel.linear import RowLinear
from slurmrl.tensors.ops import elementwise
from slurmrl.tensors.ops.elementwise import ACTIVATIONS, COMPILED, gated_halves, rotate
from slurmrl.tensors.ops.products import (
    PackedLayer,
    PackedMatrix,
    RootMeanSquare,
    linear,
    packable,
    wide_product,
)

Apply = Callable[[Tensor], Tensor]
PACKED_BYTES = 2**30
"""Maximum size of a model that is copied into the form in which processors multiply faster. The
plan counts the memory of the copy (`plan.estimates.memory`)."""


class HeadsCore(Protocol):
    """An ``AttentionCore`` that can also read queries, keys and values as one tensor."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of q, k and v, like an ``AttentionCore``."""
        ...

    def of_heads(self, spec: AttentionSpec, heads: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the attention [T, Hq, D] for heads [T, Hq + 2 Hkv, D], which are not rotated."""
        ...

    def of_layer(
        self, spec: AttentionSpec, layer: PackedLayer, x: Tensor, rotation: Rotation | None
    ) -> Tensor | None:
        """Return a layer's output [T, h] for ``x`` [T, h] from one call.

        Return None if the caller must call the parts of the layer.
        """
        ...


Forward = Callable[[Tensor, Tensor, HeadsCore], Tensor]
"""Function from (input_ids [T], positions [T], core) to hidden states [T, h]."""


def short_forward(decoder: Decoder) -> Forward | None:
    """Return a faster replacement of ``decoder.run_unhooked``; None if there is none.

    There is none for a decoder with adapters and, on several ranks, for a decoder with experts or
    sequence parallelism. The function uses the parameters' present memory, and copies of their
    present values if `packs`.
    """
    split = decoder.split
    alone = split.whole or (decoder.config.moe is None and not split.by_sequence)
    if not alone or decoder.adapters is not None:
        return None
    packed = packs(decoder)
    layers = [_short(cast(ResidualLayer, layer), packed) for layer in decoder.layers]

    def run(input_ids: Tensor, positions: Tensor, core: HeadsCore) -> Tensor:
        x = decoder.embed(embedding(input_ids), positions)
        rotation = decoder.rotation(positions, x.dtype)
        for layer in layers:
            x = layer(x, rotation, core)
        return final(x)

    embedding, final = decoder.token_embedding.forward, _norm(decoder.final_norm)
    return run


def head_product(decoder: Decoder) -> Apply:
    """Return a function from hidden states [T, h] to logits [T, V].

    V is this rank's part of the vocabulary. Logits are float64 for a model in float64, else
    float32. If `packs`, the function uses a copy of the projection's present values.
    """
    weight = decoder.head_weight()
    if packs(decoder):
        return PackedMatrix.of(weight).product
    return lambda hidden: wide_product(hidden, weight.t())


def packs(decoder: Decoder) -> bool:
    """Return whether a decoder's matrices are copied into a form with faster products."""
    size = sum(p.numel() * p.element_size() for p in decoder.parameters())
    return size <= PACKED_BYTES and packable(decoder.head_weight())


@torch.no_grad()
def join_matrices(decoder: Decoder) -> None:
    """Move parameters together in memory if ``short_forward`` uses them in one product.

    The parameters and their values do not change, but nothing else may use their old memory.
    """
    for module in decoder.modules():
        for group in _groups(module):
            for name in ("weight", "bias"):
                parameters = [getattr(linear, name) for linear in group]
                if parameters[0] is None or _joined(parameters) is not None:
                    continue
                whole = torch.cat([parameter.data for parameter in parameters])
                rows = [parameter.shape[0] for parameter in parameters]
                for parameter, part in zip(parameters, whole.split_with_sizes(rows), strict=True):
                    parameter.data = part


def _groups(module: nn.Module) -> list[tuple[nn.Linear, ...]]:
    """Return the groups of linear layers that read the same input."""
    if isinstance(module, Attention):
        return [(module.q_proj, module.k_proj, module.v_proj)]
    if isinstance(module, GatedMLP):
        return [(module.gate_proj, module.up_proj)]
    return []


def _short(layer: ResidualLayer, packed: bool) -> _Layer | _LatentLayer:
    return (_LatentLayer if isinstance(layer.self_attn, LatentAttention) else _Layer)(layer, packed)


class _LatentLayer:
    def __init__(self, layer: ResidualLayer, packed: bool) -> None:
        self._attention = layer.self_attn
        self._before = _norm(layer.input_layernorm)
        self._between = _norm(layer.post_attention_layernorm)
        self._feed_forward = _feed_forward(layer.mlp, packed, None)

    def __call__(self, x: Tensor, rotation: Rotation | None, core: HeadsCore) -> Tensor:
        x = x + self._attention.forward(self._before(x), rotation, core)
        return self._feed_forward(x, self._between(x))


class _Layer:
    def __init__(self, layer: ResidualLayer, packed: bool) -> None:
        attention = layer.self_attn
        assert isinstance(attention, Attention)
        self._attention = attention
        self._before, self._between = (
            _norm(layer.input_layernorm),
            _norm(layer.post_attention_layernorm),
        )
        whole = self._whole = _whole(layer) if packed else None
        self._qkv = whole.qkv.product if whole else _product(_groups(attention)[0], packed)
        self._sizes = [
            linear.weight.shape[0] // attention.head_dim
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        self._mixed = whole.o.added if whole else _add_product(attention.o_proj, packed)
        self._plain_heads = isinstance(attention.q_norm, nn.Identity)
        self._feed_forward = _feed_forward(layer.mlp, packed, whole)

    def __call__(self, x: Tensor, rotation: Rotation | None, core: HeadsCore) -> Tensor:
        if self._whole is not None:
            out = core.of_layer(self._attention.spec, self._whole, x, rotation)
            if out is not None:
                return out
        heads = self._qkv(self._before(x)).view(x.shape[0], -1, self._attention.head_dim)
        x = self._mixed(x, self._attended(heads, rotation, core).flatten(1))
        return self._feed_forward(x, self._between(x))

    def _attended(self, heads: Tensor, rotation: Rotation | None, core: HeadsCore) -> Tensor:
        attention = self._attention
        if self._plain_heads:
            return core.of_heads(attention.spec, heads, rotation)
        q, k, v = heads.split_with_sizes(self._sizes, 1)
        q, k = attention.q_norm(q), attention.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return core(attention.spec, q, k, v)


def _whole(layer: ResidualLayer) -> PackedLayer | None:
    """Return the matrices of a layer if one call can compute it; None for any other layer."""
    attention, block = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention)
    norms = [_plain_norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    if not isinstance(block, GatedMLP) or block.activation != COMPILED or None in norms:
        return None
    plain = isinstance(attention.q_norm, nn.Identity) and attention.sinks is None
    if not plain or attention.split.tensor.size > 1:
        return None
    first, second = (norm for norm in norms if norm is not None)
    (qkv,), (gate_up,) = _groups(attention), _groups(block)
    return PackedLayer(
        (first, second),
        _packed(qkv),
        _packed([attention.o_proj]),
        _packed(gate_up),
        _packed([block.down_proj]),
    )


def _plain_norm(module: nn.Module) -> RootMeanSquare | None:
    if not isinstance(module, RMSNorm) or module.offset:
        return None
    return RootMeanSquare(module.weight, module.eps)


def _packed(linears: Sequence[nn.Linear]) -> PackedMatrix:
    """Return the concatenated matrices and biases of linear layers."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = torch.cat([linear.weight for linear in linears])
    return PackedMatrix.of(weight, torch.cat(biases) if biases else None)


def _norm(module: nn.Module) -> Apply:
    """Return a function for a norm. The function is one call of torch if that is equally exact."""
    if not isinstance(module, RMSNorm) or module.offset or module.weight.dtype.itemsize < 4:
        return module
    weight, eps = module.weight, module.eps
    if elementwise.cpu_fits(weight):
        return lambda x: elementwise.cpu_rms_norm(x, weight, eps, 0.0)[0]
    return lambda x: F.rms_norm(x, weight.shape, weight, eps)


def _product(linears: Sequence[nn.Linear], packed: bool) -> Apply:
    """Return a function that computes the outputs of linear layers side by side.

    The function uses one product if weights are ``packed`` or side by side in memory.
    """
    if packed:
        return _packed(linears).product
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight, bias = _joined(weights), None
    if linears[0].bias is not None:
        bias = _joined([linear.bias for linear in linears])
        weight = None if bias is None else weight
    if weight is None:
        return lambda x: torch.cat([linear(x, one.weight, one.bias) for one in linears], -1)
    return lambda x: linear(x, weight, bias)


def _add_product(layer: nn.Linear, packed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from (sum, input) to the sum plus the layer's output."""
    weight, bias = layer.weight, layer.bias
    if isinstance(layer, RowLinear) and layer.split.tensor.size > 1:
        own = PackedMatrix.of(weight).product if packed else partial(linear, weight=weight)
        return lambda total, x: total + layer.whole(own(x))
    if packed:
        return _packed([layer]).added
    if bias is None:
        return lambda total, x: torch.addmm(total, x, weight.t())
    return lambda total, x: torch.addmm(total, x, weight.t()).add_(bias)


def _feed_forward(
    block: nn.Module, packed: bool, whole: PackedLayer | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function from (residual, input) to the residual plus the block's output."""
    if not isinstance(block, GatedMLP):
        return lambda residual, x: residual + block(x)
    both = whole.gate_up.product if whole else _product((block.gate_proj, block.up_proj), packed)
    down = whole.down.added if whole else _add_product(block.down_proj, packed)
    name, value = block.activation, ACTIVATIONS[block.activation].value
    compiled = name == COMPILED and elementwise.cpu_fits(block.down_proj.weight)

    def run(residual: Tensor, x: Tensor) -> Tensor:
        halves = both(x)
        if halves.is_cuda:
            return down(residual, gated_halves(halves, name))
        gate, up = halves.chunk(2, -1)
        return down(
            residual, elementwise.cpu_gated_product(gate, up) if compiled else value(gate).mul_(up)
        )

    return run


def _joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return a view of tensors that are side by side in memory; None if they are not."""
    first = parameters[0]
    place = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != place or not parameter.is_contiguous():
            return None
        place += parameter.numel() * parameter.element_size()
    if any(
        p.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for p in parameters
    ):
        return None
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
