"""Triton kernels for elementwise passes over large tensors and for key-value caches in pages.

Each kernel has an equivalent function in pure torch as its reference. Arithmetic is in float32, and
each result of an elementwise pass is rounded once. ``TRITON_INTERPRET=1`` runs the kernels on CPUs.

Shapes: t rows, T tokens, M queries, Hq query heads, Hkv key and value heads, D head size, C cells
of the cache, S splits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_statistics(
    logits, targets, normalizers, entropies, logprobs, columns, scale, block: tl.constexpr
):
    """Compute statistics of a row of logits [t, columns], in one pass with a running maximum.

    There is one program per row.
    """
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
    """Compute the gradient of a block of a row of logits [t, columns].

    There is one program per row and block. Targets may be out of range.
    """
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
    """Return the activation of x and its derivative."""
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
    """Store activation(gate) * up in ``product`` [t, columns].

    The rows of gate and up are ``stride`` elements apart.
    """
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
    """Store the product and the gradients of its factors [t, 2 columns] side by side."""
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


@triton.jit
def _product(a, b, total, interpreted: tl.constexpr):
    """Return total + a @ b in float32, because the interpreter cannot multiply half precision."""
    if interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _attended(
    asked,
    keys,
    values,
    table,
    known,
    first,
    last,
    seen_by,
    cell_stride,
    scale,
    window,
    page: tl.constexpr,
    windowed: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Attend from queries [M, columns] to the cells from ``first`` to ``last`` of a row.

    Each query sees the first ``seen_by`` [M] cells. Return the maximum score, the sum of the
    weights relative to the maximum, and the weighted sum of values. ``keys`` and ``values`` point
    to the columns of a head in cell 0.
    """
    peak = tl.full([asked.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([asked.shape[0]], tl.float32)
    mixed = tl.zeros([asked.shape[0], columns], tl.float32)
    for start in range(first, last, block):
        cell = start + tl.arange(0, block)
        stored = cell < last
        number = tl.load(table + cell // page, mask=stored, other=0)
        base = (number * page + cell % page) * cell_stride
        k = tl.load(keys[:, None] + base[None, :], mask=stored[None, :] & known[:, None], other=0.0)
        none = tl.zeros([asked.shape[0], block], tl.float32)
        scores = _product(asked, k, none, interpreted) * scale
        seen = stored[None, :] & (cell[None, :] < seen_by[:, None])
        if windowed:
            seen = seen & (cell[None, :] >= seen_by[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(
            values[None, :] + base[:, None], mask=stored[:, None] & known[None, :], other=0.0
        )
        mixed = _product(weight.to(v.dtype), v, mixed * fade[:, None], interpreted)
        peak = higher
    return peak, total, mixed


@triton.jit
def _with_sinks(sinks, within, group, peak, total, mixed):
    """Add ``sinks`` of heads, which have no value, to results of `_attended`.

    Only the program of the first part of the cells counts the sinks.
    """
    extra = tl.load(sinks + within, mask=within < group, other=0.0)
    extra = tl.where(tl.program_id(2) == 0, extra, -float("inf"))
    higher = tl.maximum(peak, extra)
    shift = tl.where(higher == -float("inf"), 0.0, higher)
    fade = tl.exp2(peak - shift)
    return higher, total * fade + tl.exp2(extra - shift), mixed * fade[:, None]


@triton.jit
def _together(rows, lengths, token, row, length, known):
    """Return which ``known`` tokens belong to ``row`` and attend to ``length`` cells."""
    same = tl.load(rows + token, mask=known, other=-1) == row
    return known & same & (tl.load(lengths + token, mask=known, other=-1) == length)


@triton.jit
def _store(target, norms, entry, inside, column, size, peak, total, mixed, split: tl.constexpr):
    """Store weighted sums as rows ``entry`` of target [·, size]; zeros if nothing was seen.

    With ``split``, also store norms, and store only the sums of rows that had cells.
    """
    divisor = tl.where(total > 0.0, total, 1.0)
    if split:
        norm = tl.where(total > 0.0, peak + tl.log2(divisor), -float("inf"))
        tl.store(norms + entry, norm, mask=inside)
        inside = inside & (total > 0.0)
    result = (mixed / divisor[:, None]).to(target.dtype.element_ty)
    place = entry[:, None] * size + column[None, :]
    tl.store(target + place, result, mask=inside[:, None] & (column < size)[None, :])


@triton.jit(do_not_specialize=["tokens", "table_stride", "window"])
def attend(
    q,
    keys,
    values,
    tables,
    rows,
    lengths,
    sinks,
    out,
    parts,
    norms,
    tokens,
    q_stride,
    table_stride,
    scale,
    window,
    page: tl.constexpr,
    group: tl.constexpr,
    size: tl.constexpr,
    windowed: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    heads: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Compute the attention of a token and the query heads of a key head over a part of the cells.

    There is one program per token, key head and part. With a ``tile`` above 1, one program computes
    adjacent tokens, each of which attends to one cell more than the previous token. A tile ends at
    a multiple of ``tile`` cells. ``group`` query heads share a key head. ``heads``, ``columns`` and
    ``block`` are powers of 2 for ``group``, ``size`` and the cells that are read at a time. Weights
    are computed as powers of 2, so ``scale`` and ``sinks`` [Hq] (or None) have the factor log2(e).

    Without ``split``, the result is ``out`` [T, Hq, D]. With ``split``, each program writes its
    result to ``parts`` [T, Hq, S, D] and the logarithm of its weights' sum to ``norms`` [T, Hq, S].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + token)
    length = tl.load(lengths + token)
    place = tl.arange(0, tile * heads)
    offset, within = place // heads, place % heads
    member = token + offset
    inside = within < group
    end = length
    seen_by = length + offset
    if tile > 1:
        if (length % tile != 0) & _together(rows, lengths, token - 1, row, length - 1, token > 0):
            return
        inside = inside & (member < tokens) & (seen_by // tile == length // tile)
        inside = _together(rows, lengths, member, row, seen_by, inside)
        end = tl.max(tl.where(inside, seen_by, 0), 0)
    begin = tl.maximum(length - window, 0) if windowed else tl.zeros_like(end)
    each = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), block) * block
    first = begin + tl.program_id(2) * each
    last = tl.minimum(first + each, end)

    column = tl.arange(0, columns)
    known = column < size
    query = member * q_stride + (head * group + within) * size
    asked = tl.load(
        q + query[:, None] + column[None, :], mask=inside[:, None] & known[None, :], other=0.0
    )
    cell_stride = tl.num_programs(1) * size
    own = head * size + column
    table = tables + row * table_stride
    peak, total, mixed = _attended(
        *(asked, keys + own, values + own, table, known, first, last, seen_by),
        *(cell_stride, scale, window, page, windowed, columns, block, interpreted),
    )
    if sinks is not None:
        peak, total, mixed = _with_sinks(sinks + head * group, within, group, peak, total, mixed)
    entry = (member * tl.num_programs(1) + head) * group + within
    if split:
        entry = entry * tl.num_programs(2) + tl.program_id(2)
        _store(parts, norms, entry, inside, column, size, peak, total, mixed, split)
    else:
        _store(out, norms, entry, inside, column, size, peak, total, mixed, split)


@triton.jit
def merge(parts, norms, out, size, splits: tl.constexpr, columns: tl.constexpr):
    """Merge the parts of a token and query head, weighted by the sums of their weights.

    There is one program per token and query head. A part without cells has a norm of minus infinity
    and is not read.
    """
    entry = tl.program_id(0).to(tl.int64)
    part = entry * splits + tl.arange(0, splits)
    column = tl.arange(0, columns)
    known = column < size
    norm = tl.load(norms + part)
    peak = tl.max(norm, 0)
    weight = tl.exp2(norm - tl.where(peak == -float("inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    result = tl.load(
        parts + part[:, None] * size + column[None, :],
        mask=(norm > -float("inf"))[:, None] & known[None, :],
        other=0.0,
    )
    mixed = tl.sum(result * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + entry * size + column, mixed.to(out.dtype.element_ty), mask=known)


@triton.jit
def write(k, v, slots, keys, values, width, k_stride, v_stride, block: tl.constexpr):
    """Write keys and values [T, width] of tokens into cells of keys, values [C, width].

    There is one program per token and ``block`` of its elements. Tokens are ``k_stride`` elements
    apart in k, and ``v_stride`` in v.
    """
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    cell = tl.load(slots + token) * width + place
    tl.store(keys + cell, tl.load(k + token * k_stride + place, mask=inside), mask=inside)
    tl.store(values + cell, tl.load(v + token * v_stride + place, mask=inside), mask=inside)
