"""The parts of a layer: feed-forward blocks, norm, rotary positions (Su et al. 2021), attention.

The attention block has projections, optional norms of queries and keys, and the rotation. An
``AttentionCore`` computes the attention itself: over packed sequences, over sequences that share
prefixes, or over a cache.

With context ranks, each rank calls attention with its part of the packed tokens. One all-to-all
gives each context rank all tokens of some heads, and a second all-to-all reverses this (Jacobs et
al. 2023, DeepSpeed Ulysses). If the ranks cannot share the heads, they pass keys and values on (Liu
et al. 2023, ring attention).

Shapes: T packed tokens, N tokens of a context rank, c context ranks, Hq query heads, Hkv key and
value heads, D head size. With shared prefixes: N distinct tokens, S pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.architecture import ModelConfig, Rope
from slurmrl.models.packed import ranges
from slurmrl.models.parallel.linear import Linear, RowLinear
from slurmrl.models.parallel.split import WHOLE, Axis, Split
from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.attention import (
    Packing,
    Prefix,
    PrefixPacking,
    prefix_attention,
)
from slurmrl.tensors.ops.collectives import Group, exchange
from slurmrl.tensors.ops.elementwise import (
    ACTIVATIONS,
    gated_linear,
    gated_product,
    rms_norm,
    rotate,
)
from slurmrl.tensors.ops.products import linear
from slurmrl.tensors.ops.ring_attention import ring_attention
from slurmrl.tensors.ops.sink_attention import causal_attention


class GatedMLP(nn.Module):
    """Feed-forward block down(activation(gate(x)) * up(x)) (Shazeer 2020, GLU variants)."""

    recomputed = False
    """Whether the backward pass calls the block again. The block then also saves the input of the
    last product, so that the second call can stop before that product."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE, inner: int = 0) -> None:
        """``inner`` is the inner size; 0 for the size of the config's dense layers."""
        super().__init__()
        self.split = split
        hidden = config.hidden_size
        inner = (inner or config.intermediate_size) // split.tensor.size
        self.gate_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [T, h] for ``x`` [T, h]."""
        x, down = self.split.enter(x), self.down_proj
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.recomputed or down.adapter is not None:
            inner = gated_product(gate, up, self.activation)
            products = down.adapted(linear(inner, down.weight), inner)
        else:
            products = gated_linear(gate, up, down.weight, self.activation)
        return down.whole(products)


class PlainMLP(nn.Module):
    """Feed-forward block down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.split = split
        hidden, inner = config.hidden_size, config.intermediate_size // split.tensor.size
        self.up_proj = Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = RowLinear(inner, hidden, bias=config.mlp_bias, split=split)
        self.activation = ACTIVATIONS[config.activation].value

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [T, h] for ``x`` [T, h]."""
        x = self.split.enter(x)
        out: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, times the weight or (1 + weight)."""

    def __init__(self, size: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps = eps
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


Rotation = tuple[Tensor, Tensor]
"""cos and sin of R rotated dims, [T, 1, R] each (see `tensors.ops.elementwise.rotate`)."""


class RotaryTable:
    """The rotation angles of all positions.

    The table is not a module, so it does not depend on the device or sharding of its model.
    """

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self._rope, self._head_dim = rope, head_dim
        self._frequencies, self._scale = frequencies(rope, head_dim)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return cos and sin for positions [T] as ``dtype``; computed in float32 or wider."""
        if self._frequencies.dtype != wide(dtype):
            self._frequencies, _ = frequencies(self._rope, self._head_dim, wide(dtype))
        self._frequencies = self._frequencies.to(positions.device)  # copies only once
        angles = (positions.to(wide(dtype))[:, None] * self._frequencies)[:, None, :]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def frequencies(
    rope: Rope, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, float]:
    """Return the angle per position of each pair [D/2], on the CPU, and a factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim
    base = rope.theta**exponents
    if rope.kind == "linear":
        return 1.0 / base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim), _yarn_scale(rope)
    return 1.0 / base, 1.0


def _llama3(freqs: Tensor, rope: Rope) -> Tensor:
    """Divide low frequencies by the factor, keep high frequencies, and interpolate between them.

    This is the formula of Llama 3.1's reference code.
    """
    low, high = float(rope.options["low_freq_factor"]), float(rope.options["high_freq_factor"])
    wavelengths = 2 * math.pi / freqs
    smooth = (rope.original_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * freqs / rope.factor + smooth * freqs
    scaled = torch.where(wavelengths > rope.original_length / low, freqs / rope.factor, blended)
    return torch.where(wavelengths < rope.original_length / high, freqs, scaled)


def _yarn(base: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Interpolate frequencies NTK-by-parts (Peng et al. 2023, YaRN, section 3.2)."""

    def turning_pair(turns: float) -> float:
        """Return the index of the pair with this many rotations within the original length."""
        return (
            head_dim
            * math.log(rope.original_length / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = turning_pair(float(rope.options.get("beta_fast") or 32))
    high = turning_pair(float(rope.options.get("beta_slow") or 1))
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoid a division by zero
    pairs = torch.arange(head_dim // 2, dtype=base.dtype, device="cpu")
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1 - keep) / (rope.factor * base) + keep / base


def _yarn_scale(rope: Rope) -> float:
    """Return the attention temperature of YaRN, which multiplies cos and sin."""
    stated = rope.options.get("attention_factor")
    if stated is not None:
        return float(stated)
    mscale, all_dim = rope.options.get("mscale"), rope.options.get("mscale_all_dim")
    if mscale and all_dim:
        return rope.growth(float(mscale)) / rope.growth(float(all_dim))
    return rope.growth()


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of a layer that an attention core needs."""

    layer: int
    scale: float
    """Factor of the scores."""
    window: int | None
    """Number of tokens that a token attends to, itself included; None for all."""
    sinks: Tensor | None = None
    """Additional scores without values, one for each query head [Hq]."""


class AttentionCore(Protocol):
    """Attention over packed sequences, or over cached keys and values."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return one layer's attention [T, Hq, D] for q [T, Hq, D], k and v [T, Hkv, D]."""
        ...


class PackedCore:
    """Causal attention within each packed sequence."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, self._packing, spec.scale, spec.window, spec.sinks)


class Attention(nn.Module):
    """Self-attention with grouped key and value heads.

    Each tensor rank has some of the heads. If there are fewer key and value heads than tensor
    ranks, several ranks have copies of a head.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        scale: float | None = None,
        split: Split = WHOLE,
    ) -> None:
        """Make uninitialized parameters. ``scale`` defaults to 1 / sqrt(head_dim)."""
        super().__init__()
        self.split = split
        self.head_dim = config.head_dim
        scale = config.head_dim**-0.5 if scale is None else scale
        self._spec = AttentionSpec(layer, scale, config.windows[layer])
        heads = config.num_heads // split.tensor.size
        hidden, q = config.hidden_size, heads * config.head_dim
        self.sinks = nn.Parameter(torch.empty(heads)) if config.family.sinks else None
        kv = kv_heads(config, split) * config.head_dim
        self.q_proj = Linear(hidden, q, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, kv, bias=config.qkv_bias)
        self.o_proj = RowLinear(q, hidden, bias=config.o_bias, split=split)
        if config.qk_norm:
            self.q_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm: nn.Module = RMSNorm(config.head_dim, config.norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    @property
    def spec(self) -> AttentionSpec:
        """Settings for a core, with the current sinks."""
        return self._spec if self.sinks is None else replace(self._spec, sinks=self.sinks)

    def forward(self, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
        """Map ``x`` [T, h] to [T, h], where T tokens are on this rank between the blocks."""
        x = self.split.enter(x)
        heads = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, heads))
        k = self.k_norm(self.k_proj(x).unflatten(-1, heads))
        v = self.v_proj(x).unflatten(-1, heads)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed: Tensor = self.o_proj(core(self.spec, q, k, v).flatten(1))
        return mixed


def kv_heads(config: ModelConfig, split: Split) -> int:
    """Return the number of key and value heads of a tensor rank."""
    return max(1, config.num_kv_heads // split.tensor.size)


class SplitCore:
    """Core for a rank's part of the tokens, around a core for all ``tokens``.

    The parts of the last ranks may end with padding, which the inner core does not get.
    """

    def __init__(self, core: AttentionCore, context: Axis, tokens: int) -> None:
        self._core, self._context, self._tokens = core, context, tokens

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [N, Hq, D] for q [N, Hq, D], k and v [N, Hkv, D]."""
        if self._context.size > 1:
            q, k, v = heads_of_all_tokens(q, k, v, self._context.group)
            if spec.sinks is not None:
                own = spec.sinks.chunk(self._context.size)[self._context.rank]
                spec = replace(spec, sinks=own)
        filled = q.shape[0] - self._tokens
        out = self._core(spec, *(x[: self._tokens] for x in (q, k, v)))
        out = F.pad(out, (0, 0, 0, 0, 0, filled))
        return tokens_of_all_heads(out, self._context.group) if self._context.size > 1 else out


def heads_of_all_tokens(q: Tensor, k: Tensor, v: Tensor, group: Group) -> list[Tensor]:
    """Return this rank's heads of all tokens: q [·, Hq/c, D], k and v [·, Hkv/c, D].

    The c ranks of ``group`` exchange tokens for heads (Jacobs et al. 2023, DeepSpeed Ulysses). Each
    rank gets adjacent query heads and their key heads. If there are fewer key heads than ranks,
    several ranks get the same key head.
    """
    size, copies = group.size(), max(1, group.size() // k.shape[1])
    parts = [q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)]
    parts = [x.view(x.shape[0], size, -1, x.shape[2]).transpose(0, 1) for x in parts]
    own = exchange(torch.cat(parts, 2).flatten(0, 1), group)
    return list(own.split_with_sizes([x.shape[2] for x in parts], 1))


def tokens_of_all_heads(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens [N, Hq, D] from its heads [·, Hq/c, D] of all tokens.

    This undoes `heads_of_all_tokens`.
    """
    parts = exchange(x, group).view(group.size(), -1, *x.shape[1:])
    return parts.transpose(0, 1).flatten(1, 2)


class RingCore:
    """Core for packed sequences whose keys and values are passed around the context ranks.

    The parts of the last ranks may end with padding, where the output is zero.
    """

    def __init__(self, bounds: Sequence[int], split: Split) -> None:
        """Attend within sequences with boundaries ``bounds`` [S+1], sorted by length."""
        self._bounds, self._split = bounds, split
        first, last = split.own_range(bounds[-1])
        self._own, self._part = last - first, split.part_tokens(bounds[-1])

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention [N, Hq, D] for q [N, Hq, D], k and v [N, Hkv, D]."""
        filled, group = q.shape[0] - self._own, self._split.context.group
        q, k, v = (x[: self._own] for x in (q, k, v))
        seen = (self._bounds, self._part, group, spec.scale, spec.window)
        out = ring_attention(q, k, v, *seen, spec.sinks)
        return F.pad(out, (0, 0, 0, 0, 0, filled))


def split_core(core: AttentionCore, split: Split, tokens: int) -> AttentionCore:
    """Return ``core``, or a `SplitCore` around it if this rank does not have all tokens."""
    if split.ring or (split.context.size == 1 and split.part_tokens(tokens) == tokens):
        return core
    return SplitCore(core, split.context, tokens)


@dataclass(frozen=True)
class Pieces:
    """The boundaries of packed pieces of sequences.

    A piece is a sequence, a prefix of sequences, or the suffix of a sequence. A suffix begins with
    the last token of its prefix. Every token except the first of a piece therefore follows the
    token that predicts it.
    """

    cu_seqlens: Tensor
    """[S+1] int32 in host memory: boundaries of the pieces."""
    prefixes: Tensor
    """[S] int64 in host memory: index of the piece that is the prefix of a suffix, and -1 for other
    pieces. A prefix is not itself a suffix."""


class Arrangement(NamedTuple):
    """The order in which the layers read the tokens of pieces."""

    order: Tensor
    """[N]: index of each token that the layers read."""
    back: Tensor
    """[T]: index in ``order`` of each token."""
    positions: Tensor
    """[N]: position of each token that the layers read in its whole sequence."""
    core: PrefixCore


class PrefixCore:
    """Causal attention within each sequence; sequences may share prefixes."""

    def __init__(self, packing: PrefixPacking) -> None:
        self._packing = packing

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert spec.window is None or spec.window >= self._packing.pieces.max_len, "no windows"
        assert spec.sinks is None, "no sinks"
        return prefix_attention(q, k, v, self._packing, spec.scale)


def arranged(pieces: Pieces, max_len: int) -> Arrangement:
    """Arrange the distinct tokens of pieces, sorted by the length of their piece.

    Attention needs fewer calls if pieces of equal length are adjacent. Whole sequences have up to
    ``max_len`` tokens.
    """
    starts, stops = pieces.cu_seqlens[:-1].long(), pieces.cu_seqlens[1:].long()
    prefixes = pieces.prefixes
    rests = (prefixes >= 0).nonzero().squeeze(1)
    firsts = starts.index_add(0, rests, torch.ones_like(rests))  # skip a suffix's repeated token
    lengths = stops - firsts
    by_length = lengths.argsort(stable=True)
    cu_sorted = F.pad(lengths[by_length].cumsum(0), (1, 0))
    own = torch.empty_like(firsts).scatter_(0, by_length, cu_sorted[:-1])
    order = ranges(firsts[by_length], lengths[by_length])
    back = torch.empty(int(pieces.cu_seqlens[-1]), dtype=torch.int64)
    back[order] = torch.arange(order.shape[0])
    back[starts[rests]] = back[stops[prefixes[rests]] - 1]
    before = torch.zeros_like(lengths).index_copy(0, rests, lengths[prefixes[rests]])
    positions = ranges(before[by_length], lengths[by_length])
    by_prefix = rests[prefixes[rests].argsort(stable=True)]
    readers = torch.zeros_like(lengths).index_add(0, prefixes[rests], lengths[rests])
    shared = [
        Prefix(int(own[piece]), int(lengths[piece]), int(readers[piece]))
        for piece in sorted({*prefixes[rests].tolist()})
    ]
    packing = PrefixPacking(
        Packing(cu_sorted.to(torch.int32), max_len),
        shared,
        ranges(own[by_prefix], lengths[by_prefix]),
    )
    return Arrangement(order, back, positions, PrefixCore(packing))
