"""Matrix products that torch lacks or computes slowly.

- half-precision matrices with float32 results;
- float32 matrices on CPUs for which torch's own products use half of the vector width;
- many inputs with one float32 matrix on a CPU;
- all products of a layer;
- one of several experts' matrices per token;
- adapters of low rank.

Products of two bfloat16 numbers are exact in float32, so only the sums are rounded.

Shapes: T tokens, i inputs, o outputs, h hidden size, Hq query heads, Hkv key and value heads, D
head size, r rank of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn import functional as F

from slurmrl.tensors.ops.arguments import wide
from slurmrl.tensors.ops.native.loading import for_floats
from slurmrl.tensors.ops.splitmix import mix, shift

PANEL: Final = 32
"""Number of adjacent outputs in a packed matrix."""


ALIGNMENT_BYTES = 16
"""Alignment that torch's grouped kernels require of the rows of all operands."""
ON_GPUS = (torch.bfloat16,)
ON_CPUS = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = 2**16
"""Resolution of the dropout probability, which is rounded to a multiple of 1 / LEVELS."""
PER_DRAW = 4
"""Number of inputs that share 64 random bits."""
WIDE_PRODUCT: Final = 2**26
"""Minimum number of multiplications of a product that oneDNN computes. oneDNN compiles a kernel
for each new shape in about 0.4 ms; torch computes a product of this size in 1.3 ms."""
ROWS_PER_SUM: Final = 4096
"""Number of rows of the total to which oneDNN's product is added at a time."""
BLOCK = 2**22
"""Number of inputs that get random numbers at a time."""


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b for matrices of one dtype, without gradients; write it into ``out`` if given.

    On processors of AMD, torch multiplies float32 matrices with MKL, which uses AVX2. For large
    products, this function uses oneDNN, which takes half the time with AVX-512.
    """
    if not _by_onednn(a, b.shape[1]):
        return torch.mm(a, b, out=out)
    (rows, inner), columns = a.shape, b.shape[1]
    if a.is_contiguous() or rows * inner <= columns * (inner + rows):
        found = _onednn(a, b.t(), None)
    else:  # oneDNN would copy a first factor that is stored by columns.
        found = _onednn(b.t(), a, None).t()
    return found.contiguous() if out is None else out.copy_(found)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear`` of x [..., i], weight [o, i] and bias [o], computed as `product`."""
    if type(weight) not in (Tensor, Parameter) or not _by_onednn(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        out = _onednn(rows, weight, bias)
    else:
        out = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*x.shape[:-1], weight.shape[0])


def _by_onednn(a: Tensor, columns: int) -> bool:
    """Return whether oneDNN computes the product of ``a`` and a matrix with ``columns`` columns."""
    if a.dtype != torch.float32 or a.device.type != "cpu":
        return False
    return a.numel() * columns >= WIDE_PRODUCT and _half_width()


@cache
def _half_width() -> bool:
    """Return whether torch's own products use only half of this CPU's vector width."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch._C._has_mkldnn:
        return False
    processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return torch._C.has_mkl and "AuthenticAMD" in processor


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [T, i] times weight [o, i], plus bias.

    oneDNN copies an x that is not contiguous. A weight with gaps between both rows and columns is
    copied here, because oneDNN's loop for such a weight takes a thousand times as long.
    """
    if not weight.is_contiguous() and not weight.t().is_contiguous():
        weight = weight.t().contiguous().t() if weight.stride(0) == 1 else weight.contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight) if of_x else None,
            product(grad.t(), x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b without gradients, for matrices of one dtype.

    The result is float64 for float64 inputs, else float32.
    """
    dtype = wide(a.dtype)
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return product(a.to(dtype), b.to(dtype))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total`` in place, without gradients. ``total`` may have a wider dtype."""
    if a.is_cuda and a.dtype != total.dtype and _adds_in_place(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    elif _by_onednn(a, b.shape[1]) and a.dtype == total.dtype:
        turned = b.t().contiguous()
        for part, rows in zip(
            torch.split(total, ROWS_PER_SUM), torch.split(a, ROWS_PER_SUM), strict=True
        ):
            part += _onednn(turned, rows, None).t()
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@cache
def _adds_in_place(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch release adds half-precision products to a float32 matrix."""
    total, a = torch.zeros((8, 8), device=device), torch.zeros((8, 8), dtype=dtype, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [T, i] times weight [o, i]: [T, o] in float64 for float64 inputs, else float32."""
    out: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.to(grad.dtype)).to(x.dtype)
        grad_weight = product(grad.t(), x.to(grad.dtype)).to(weight.dtype)
        return grad_x, grad_weight


@dataclass(frozen=True)
class PackedMatrix:
    """A copy of a matrix W [o, i] and a bias b [o] for compiled products on CPUs.

    The elements are in the order in which these products read them. The result for a row depends
    only on that row, not on the number of rows.
    """

    packed: Tensor
    """[⌈o / 32⌉, i, 32]: groups of 32 outputs; zeros after the last output."""
    bias: Tensor | None
    outer: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
        """Pack a matrix and a bias, which must be `packable`."""
        outer, inner = weight.shape
        packed = weight.new_empty((-(-outer // PANEL), inner, PANEL))
        for_floats(weight).pack.default(weight.detach().contiguous(), packed)
        return cls(packed, bias, outer)

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + b [T, o] for x [T, i]."""
        return self._computed(x, None)

    def added(self, total: Tensor, x: Tensor) -> Tensor:
        """Return ``total`` [T, o] + x W^T + b."""
        return self._computed(x, total.contiguous())

    def _computed(self, x: Tensor, total: Tensor | None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((x.shape[0], self.outer))
        for_floats(x).product.default(x, self.packed, self.bias, total, out)
        return out


def packable(weight: Tensor) -> bool:
    """Return whether `PackedMatrix` supports matrices of this dtype on this device."""
    return for_floats(weight) is not None


@dataclass(frozen=True)
class RootMeanSquare:
    """A root-mean-square norm."""

    weight: Tensor
    """[h]"""
    eps: float


class PackedLayer:
    """A layer y = x + o(attention(qkv(norm(x)))), then y + down(silu(gate) * up), in one call.

    ``gate`` and ``up`` are the halves of gate_up(norm(y)). The weights are copied into one tensor.
    The layer's matrices are views of this tensor.
    """

    def __init__(
        self,
        norms: tuple[RootMeanSquare, RootMeanSquare],
        qkv: PackedMatrix,
        o: PackedMatrix,
        gate_up: PackedMatrix,
        down: PackedMatrix,
    ) -> None:
        """Copy qkv [(Hq + 2 Hkv) D, h], o [h, Hq D], gate_up [2i, h] and down [h, i]."""
        first, second = norms
        parts = [first.weight, *_of(qkv), *_of(o), second.weight, *_of(gate_up), *_of(down)]
        self._weights = torch.cat([part.detach().flatten() for part in parts])
        views = self._weights.split_with_sizes([part.numel() for part in parts])
        self.qkv = PackedMatrix(views[1].view_as(qkv.packed), views[2], qkv.outer)
        self.o = PackedMatrix(views[3].view_as(o.packed), views[4], o.outer)
        self.gate_up = PackedMatrix(views[6].view_as(gate_up.packed), views[7], gate_up.outer)
        self.down = PackedMatrix(views[8].view_as(down.packed), views[9], down.outer)
        self._eps = (first.eps, second.eps)

    def decode(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        *,
        page: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Return the layer's output [T, h] for ``x`` [T, h].

        The layer attends as `paged_kernels.attend_heads` does, with the same arguments.
        """
        out = torch.empty_like(x)
        size = keys.shape[2]
        heads = self.qkv.outer // size - 2 * keys.shape[1]
        cos, sin = rotation or (None, None)
        places = (keys, values, slots, tables, rows, lengths)
        sizes = (heads, self.gate_up.outer // 2, page, scale, window or 0)
        for_floats(x).layer.default(x, self._weights, cos, sin, *places, out, *sizes, *self._eps)
        return out


def _of(matrix: PackedMatrix) -> tuple[Tensor, Tensor]:
    bias = matrix.bias
    return matrix.packed, matrix.packed.new_zeros(matrix.outer) if bias is None else bias


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return [M, o]: tokens x [M, i], sorted by expert, times their expert's matrix.

    ``weight`` is [E, o, i], and ``counts`` [E] is the number of tokens of each expert. If torch has
    a grouped kernel for the dtype and sizes, use it; else loop over the experts with tokens.
    """
    if _fits(x, weight):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    sizes: list[int] = counts.tolist()
    parts, matrices = x.split_with_sizes(sizes), weight.unbind()
    used = [n for n, size in enumerate(sizes) if size] or [0]
    return torch.cat([linear(parts[n], matrices[n]) for n in used])


def _fits(x: Tensor, weight: Tensor) -> bool:
    aligned = all(n * x.element_size() % ALIGNMENT_BYTES == 0 for n in weight.shape[1:])
    return aligned and x.dtype in (ON_GPUS if x.is_cuda else ON_CPUS)


@dataclass(frozen=True)
class Dropout:
    """Dropout of a product's inputs.

    Whether an input becomes zero is a pure function of the token's key in ``keys`` [T] int64, the
    ``salt`` of the matrix, and the column of the whole matrix.
    """

    keys: Tensor
    salt: int
    rate: float
    first: int = 0
    """Column of the whole matrix to which the first input belongs."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, i]: some elements zero, others divided by the keep probability."""
        dropped = round(self.rate * LEVELS)
        out = torch.empty_like(x)
        rows = max(1, BLOCK // max(x.shape[1], 1))
        for begin in range(0, x.shape[0], rows):
            span = slice(begin, begin + rows)
            kept = self._levels(self.keys[span], x.shape[1]) >= dropped
            out[span] = x[span] * kept * (LEVELS / (LEVELS - dropped))
        return out

    def _levels(self, keys: Tensor, inputs: int) -> Tensor:
        """Return a random number in 0 .. LEVELS - 1 for each input, [t, i] int64."""
        begin, end = self.first // PER_DRAW, -(-(self.first + inputs) // PER_DRAW)
        places = torch.arange(begin, end, device=keys.device)
        bits = mix(mix(keys ^ self.salt)[:, None] ^ places)
        parts = torch.stack([shift(bits, 16 * n) & (LEVELS - 1) for n in range(PER_DRAW)], -1)
        offset = self.first - begin * PER_DRAW
        return parts.flatten(1)[:, offset : offset + inputs]


def low_rank_linear(
    x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: Dropout | None = None
) -> Tensor:
    """Return scale * dropout(x) A^T B^T [T, o] for x [T, i], a [r, i], b [o, r] of one dtype.

    Only x and a result [T, r] are kept for the backward pass, which repeats the dropout.
    """
    out: Tensor = _LowRankLinear.apply(x, a, b, scale, dropout)  # type: ignore[no-untyped-call]
    return out


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: Dropout | None
    ) -> Tensor:
        inner = F.linear(x if dropout is None else dropout(x), a)
        ctx.save_for_backward(x, a, b, inner)
        ctx.scale, ctx.dropout = scale, dropout
        return F.linear(inner * scale, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x, a, b, inner = ctx.saved_tensors
        grad_inner = (grad @ b) * ctx.scale
        grad_b = grad.t() @ (inner * ctx.scale)
        grad_a = grad_inner.t() @ (x if ctx.dropout is None else ctx.dropout(x))
        grad_x = grad_inner @ a if ctx.needs_input_grad[0] else None
        if grad_x is not None and ctx.dropout is not None:
            grad_x = ctx.dropout(grad_x)
        return grad_x, grad_a, grad_b, None, None
