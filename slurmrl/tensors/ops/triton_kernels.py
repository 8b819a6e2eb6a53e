"""Triton kernels for elementwise passes over large tensors. Their torch forms are their references.

Arithmetic is in float32, and each result is rounded once. ``TRITON_INTERPRET=1`` runs them on CPUs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_statistics(
    logits,
    targets,
    normalizers,
    entropies,
    logprobs,
    columns,
    scale,
    block: tl.constexpr,
):
    """One program per row of logits [t, columns], in one pass with a running maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    peak = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        inside = column < columns
        z = tl.load(logits + column, mask=inside, other=-float("inf")) * scale
        higher = tl.maximum(peak, tl.max(z, 0))
        shift = tl.where(total > 0, peak - higher, 0.0)
        weighted = (weighted + total * shift) * tl.exp(shift)
        total = total * tl.exp(shift)
        distance = tl.where(inside, z - higher, 0.0)
        weight = tl.where(inside, tl.exp(distance), 0.0)
        total += tl.sum(weight, 0)
        weighted += tl.sum(weight * distance, 0)
        peak = higher
    normalizer = peak + tl.log(total)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    target = tl.load(targets + row)
    tl.store(logprobs + row, tl.load(logits + target) * scale - normalizer)


@triton.jit
def logit_gradient(
    logits,
    gradient,
    targets,
    normalizers,
    entropies,
    grad_logprobs,
    grad_entropies,
    columns,
    scale,
    block: tl.constexpr,
):
    """One program per row and block of logits [t, columns]; targets may be out of range."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    place = row * columns + column
    logq = tl.load(logits + place, mask=inside, other=0.0) * scale - tl.load(normalizers + row)
    grad_logprob = tl.load(grad_logprobs + row)
    pull = (logq + tl.load(entropies + row)) * tl.load(grad_entropies + row) + grad_logprob
    at_target = tl.where(column == tl.load(targets + row), grad_logprob, 0.0)
    result = (at_target - tl.exp(logq) * pull) * scale
    tl.store(gradient + place, result.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _activated(x, activation: tl.constexpr):
    """The activation of x and its derivative."""
    if activation == "silu":
        share = 1.0 / (1.0 + tl.exp(-x))
        return x * share, share * (1.0 + x * (1.0 - share))
    if activation == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if activation == "gelu_tanh":
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        share = 1.0 / (1.0 + tl.exp(-inner))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * share, share + x * share * (1.0 - share) * slope
    return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)


@triton.jit
def gated_product(
    gate, up, product, columns, stride, activation: tl.constexpr, block: tl.constexpr
):
    """product [t, columns] = activation(gate) * up, whose rows are ``stride`` elements apart."""
    blocks = tl.cdiv(columns, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = column < columns
    source = row * stride + column
    value, _ = _activated(tl.load(gate + source, mask=inside, other=0.0).to(tl.float32), activation)
    result = value * tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + row * columns + column, result.to(product.dtype.element_ty), mask=inside)


@triton.jit
def gated_gradient(
    gate,
    up,
    grad_product,
    product,
    gradients,
    columns,
    stride,
    activation: tl.constexpr,
    block: tl.constexpr,
):
    """The product again, and the gradients of its factors side by side [t, 2 columns]."""
    blocks = tl.cdiv(columns, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = column < columns
    source, place = row * stride + column, row * columns + column
    value, slope = _activated(
        tl.load(gate + source, mask=inside, other=0.0).to(tl.float32), activation
    )
    factor = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_product + place, mask=inside, other=0.0).to(tl.float32)
    dtype = product.dtype.element_ty
    tl.store(product + place, (value * factor).to(dtype), mask=inside)
    both = gradients + 2 * row * columns + column
    tl.store(both, (grad * factor * slope).to(dtype), mask=inside)
    tl.store(both + columns, (grad * value).to(dtype), mask=inside)


@triton.jit
def rotation(x, cos, sin, out, per_token, size, sign, block: tl.constexpr):
    """Rotate the heads of one token by its angles, or back with a ``sign`` of -1.

    x, out [T, per_token]: heads of ``size``; cos, sin [T, size].
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < per_token
    within = place % size
    partner = place - within + (within + size // 2) % size
    x += token * per_token
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * size + within, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * size + within, mask=inside, other=0.0).to(tl.float32)
    result = own * c + other * s * sign
    tl.store(out + token * per_token + place, result.to(out.dtype.element_ty), mask=inside)
