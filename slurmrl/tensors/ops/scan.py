"""Discounted sums over packed sequences, and advantages (GAE) computed from them.

Shapes: T packed tokens, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurmrl.tensors.ops.arguments import (
    FLOATS,
    check_first,
    check_offsets,
    check_share,
    check_vector,
    wide,
)
from slurmrl.tensors.ops.native.loading import operators


class SequenceIndex:
    """The sequence [T] of each packed token, and the number [T] of tokens from it to the end."""

    def __init__(self, cu_seqlens: Tensor, tokens: int) -> None:
        ends = cu_seqlens[1:].long()
        numbers = torch.arange(len(ends), device=ends.device)
        lengths = ends - cu_seqlens[:-1].long()
        self.sequence = numbers.repeat_interleave(lengths, output_size=tokens)
        self.step = torch.arange(tokens, device=ends.device)
        self.left = ends[self.sequence] - self.step

    def longest_bound(self) -> int:
        """Return an upper bound of sequence lengths: T on a GPU, so that the host need not wait."""
        if self.left.device.type != "cpu":
            return len(self.left)
        return int(self.left.max()) if len(self.left) else 0


def discounted_sums(
    x: Tensor,
    cu_seqlens: Tensor,
    factor: float,
    decay: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """Return y_t = x_t + factor decay_t y_{t+1} in each sequence, [T]; y after its end is ``tail``.

    Differentiable in x, decay and tail. The result is float64 for float64 inputs, else float32.

    - ``x``: [T] float32, float64, bfloat16 or float16.
    - ``cu_seqlens``: [S+1] int32 or int64, cumulative lengths; sequences may be empty.
    - ``factor``: between 0 and 1.
    - ``decay``: [T] of x's dtype; None means ones. An entry of 0 cuts off all later values, even
      infinities and NaN.
    - ``tail``: [S] of x's dtype; None means zeros.

    Raises UsageError for invalid arguments.
    """
    sums: Tensor = _scan(x, cu_seqlens, decay, tail, factor)
    return sums


def discounted_returns(rewards: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """Return R_t = r_t + gamma R_{t+1}, [T]; after the end of a sequence, R is 0."""
    check_first("rewards", rewards, FLOATS)
    check_offsets(cu_seqlens, len(rewards), rewards.device)
    check_share("gamma", gamma)
    return discounted_sums(rewards, cu_seqlens, gamma)


@torch.library.custom_op("slurmrl::scan", mutates_args=())
def _scan(
    x: Tensor, cu_seqlens: Tensor, decay: Tensor | None, tail: Tensor | None, factor: float
) -> Tensor:
    check_first("x", x, FLOATS)
    check_offsets(cu_seqlens, len(x), x.device)
    check_share("factor", factor)
    if decay is not None:
        check_vector("decay", decay, len(x), (x.dtype,), x.device)
    if tail is not None:
        check_vector("tail", tail, len(cu_seqlens) - 1, (x.dtype,), x.device)
    native = operators(x.device, len(x))
    if native is None:
        return scan_reference(x, cu_seqlens, factor, decay, tail)
    y = torch.empty(x.shape, dtype=wide(x.dtype), device=x.device)
    native.scan(*map(contiguous, (x, cu_seqlens, decay, tail)), y, factor)
    return y


@_scan.register_fake
def _scan_fake(
    x: Tensor, cu_seqlens: Tensor, decay: Tensor | None, tail: Tensor | None, factor: float
) -> Tensor:
    return x.new_empty(x.shape, dtype=wide(x.dtype))


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cu_seqlens, decay, tail, ctx.factor = inputs
    ctx.save_for_backward(cu_seqlens, decay, tail, output)
    ctx.dtype = x.dtype


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs.

    With c = factor decay: dx_t = dy_t + c_{t-1} dx_{t-1}, dc_t = dx_t y_{t+1} and dtail = c dx at
    each sequence's last token.
    """
    cu_seqlens, decay, tail, y = ctx.saved_tensors
    index = SequenceIndex(cu_seqlens, len(grad))
    grad_x = forward_sums(
        grad, cu_seqlens, ctx.factor, None if decay is None else decay.to(grad.dtype)
    )
    at_end = grad_x * ctx.factor if decay is None else grad_x * decay * ctx.factor
    grad_tail = None
    if tail is not None:
        ends = torch.where(index.left == 1, at_end, torch.zeros_like(at_end))
        grad_tail = tail.new_zeros(tail.shape, dtype=grad.dtype)
        grad_tail = grad_tail.index_add(0, index.sequence, ends).to(ctx.dtype)
    grad_decay = None
    if decay is not None:
        behind = torch.cat([y[1:], y[:1]])
        last = torch.zeros_like(y) if tail is None else tail.to(y.dtype)[index.sequence]
        behind = torch.where(index.left > 1, behind, last)
        grad_decay = (ctx.factor * grad_x * behind).to(ctx.dtype)
    return grad_x.to(ctx.dtype), None, grad_decay, grad_tail, None


_scan.register_autograd(_scan_backward, setup_context=_keep_scan)


def forward_sums(
    x: Tensor, cu_seqlens: Tensor, factor: float, decay: Tensor | None = None
) -> Tensor:
    """Return y_t = x_t + factor decay_{t-1} y_{t-1} within each sequence, [T]."""
    turned = len(x) - cu_seqlens.flip(0)
    # In reversed order, decay_{t-1} must be at the index of t.
    turned_decay = None if decay is None else decay.roll(1).flip(0)
    return discounted_sums(x.flip(0), turned, factor, turned_decay).flip(0)


def scan_reference(
    x: Tensor,
    cu_seqlens: Tensor,
    factor: float,
    decay: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """Return `discounted_sums` in pure torch, bit-identical to the compiled form on a CPU."""
    index = SequenceIndex(cu_seqlens, len(x))
    dtype = wide(x.dtype)
    sums = x.to(dtype, copy=True)  # An operator must not return its argument.
    coefficient = torch.full_like(sums, factor) if decay is None else factor * decay.to(dtype)
    if tail is not None:
        behind = tail.to(dtype)[index.sequence]
        reached = (index.left == 1) & (coefficient != 0.0)
        sums = torch.where(reached, sums + coefficient * behind, sums)
    if decay is None:
        return doubled(sums, index, factor)
    return _doubled_with_decay(sums, coefficient, index)


def doubled(sums: Tensor, index: SequenceIndex, factor: float) -> Tensor:
    """Return the sums over i of factor^i x[t+i] up to the end of t's sequence, [T].

    Each pass doubles the number of terms, so there are log2(longest) passes over all tokens.
    """
    span, longest = 1, index.longest_bound()
    while span < longest and factor**span > 0.0:
        further = torch.where(index.left[:-span] > span, sums[span:], torch.zeros_like(sums[span:]))
        sums = torch.cat([sums[:-span] + factor**span * further, sums[-span:]])
        span *= 2
    return sums


def _doubled_with_decay(sums: Tensor, factors: Tensor, index: SequenceIndex) -> Tensor:
    """Return `doubled` with a factor per token; each term has the product of its factors."""
    span, longest = 1, index.longest_bound()
    while span < longest:
        inside = (index.left[:-span] > span) & (factors[:-span] != 0.0)
        further = torch.where(inside, sums[span:], torch.zeros_like(sums[span:]))
        beyond = torch.where(inside, factors[span:], torch.zeros_like(factors[span:]))
        sums = torch.cat([sums[:-span] + factors[:-span] * further, sums[-span:]])
        factors = torch.cat([factors[:-span] * beyond, factors[-span:]])
        span *= 2
    return sums


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and returns of each step.

    Advantages are A_t = sum_i (gamma lam)^i delta_{t+i} with delta_t = r_t + gamma V_{t+1} - V_t,
    and returns A_t + V_t (Schulman et al. 2016, "High-dimensional continuous control using
    generalized advantage estimation", eq. 16).

    Differentiable in rewards and values. Both results are [T], float64 for float64 inputs, else
    float32. On CPUs, the compiled form and the torch form give equal bits.

    - ``rewards``: [T] float32, float64, bfloat16 or float16, the concatenated steps of S sequences.
    - ``values``: [T+S] of rewards' dtype; for each sequence the values of the states before its
      steps, then of its final state. With ``bootstrap_values``, [T] without the final states.
    - ``cu_seqlens``: [S+1] int32 or int64, cumulative numbers of steps; sequences may be empty.
    - ``truncated``: [S] bool; False if the sequence terminated. Its final state then has value 0.
    - ``gamma`` and ``lam``: discount and lambda, between 0 and 1.
    - ``bootstrap_values``: [S] of rewards' dtype, the values of the final states.

    Raises UsageError for invalid arguments.
    """
    both: tuple[Tensor, Tensor] = _gae(
        rewards, values, cu_seqlens, truncated, bootstrap_values, gamma, lam
    )
    return both


@torch.library.custom_op("slurmrl::gae", mutates_args=())
def _gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    _check(rewards, values, cu_seqlens, truncated, bootstrap_values)
    check_share("gamma", gamma)
    check_share("lam", lam)
    native = operators(rewards.device, len(rewards))
    if native is None:
        return gae_reference(rewards, values, cu_seqlens, truncated, gamma, lam, bootstrap_values)
    advantages = torch.empty(rewards.shape, dtype=wide(rewards.dtype), device=rewards.device)
    returns = torch.empty_like(advantages)
    inputs = (rewards, values, cu_seqlens, truncated, bootstrap_values)
    native.gae(*map(contiguous, inputs), advantages, returns, gamma, lam)
    return advantages, returns


@_gae.register_fake
def _gae_fake(rewards: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    advantages = rewards.new_empty(rewards.shape, dtype=wide(rewards.dtype))
    return advantages, torch.empty_like(advantages)


def _check(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor | None,
) -> None:
    check_first("rewards", rewards, FLOATS)
    steps, like = len(rewards), ((rewards.dtype,), rewards.device)
    check_offsets(cu_seqlens, steps, rewards.device)
    sequences = len(cu_seqlens) - 1
    check_vector("truncated", truncated, sequences, (torch.bool,), rewards.device)
    if bootstrap_values is None:
        check_vector("values", values, steps + sequences, *like)
    else:
        check_vector("values", values, steps, *like)
        check_vector("bootstrap_values", bootstrap_values, sequences, *like)


def _keep_gae(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rewards, values, cu_seqlens, truncated, bootstrap_values, ctx.gamma, ctx.lam = inputs
    ctx.save_for_backward(cu_seqlens, truncated)
    ctx.like_rewards, ctx.values = rewards.dtype, len(values)
    ctx.aligned = bootstrap_values is not None


def _gae_backward(
    ctx: Any, grad_advantages: Tensor, grad_returns: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs.

    With dr_t = sum_i (gamma lam)^i (dA + dR)_{t-i}, the value before step t gets dR_t - dr_t, and
    the value after step t gets gamma dr_t.
    """
    cu_seqlens, truncated = ctx.saved_tensors
    index = SequenceIndex(cu_seqlens, len(grad_returns))
    grad_rewards = forward_sums(grad_advantages + grad_returns, cu_seqlens, ctx.gamma * ctx.lam)
    before = grad_returns - grad_rewards
    behind = ctx.gamma * grad_rewards
    at_end = torch.where(truncated[index.sequence], behind, torch.zeros_like(behind))
    behind = torch.where(index.left > 1, behind, at_end)
    grad_bootstrap = None
    if ctx.aligned:
        inner = torch.where(index.left > 1, behind, torch.zeros_like(behind))
        grad_values = before + torch.cat([inner[-1:], inner[:-1]])
        ends = behind - inner
        grad_bootstrap = ends.new_zeros(len(truncated)).index_add(0, index.sequence, ends)
        grad_bootstrap = grad_bootstrap.to(ctx.like_rewards)
    else:
        place = index.step + index.sequence
        zeros = before.new_zeros(ctx.values)
        grad_values = zeros.index_copy(0, place, before) + zeros.index_copy(0, place + 1, behind)
    dtype = ctx.like_rewards
    return grad_rewards.to(dtype), grad_values.to(dtype), None, None, grad_bootstrap, None, None


_gae.register_autograd(_gae_backward, setup_context=_keep_gae)


def gae_reference(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `packed_gae` in pure torch."""
    index = SequenceIndex(cu_seqlens, len(rewards))
    dtype = wide(rewards.dtype)
    if bootstrap_values is None:
        before = values.to(dtype)[index.step + index.sequence]
        behind = values.to(dtype)[index.step + index.sequence + 1]
    else:
        before = values.to(dtype)
        last = bootstrap_values.to(dtype)[index.sequence]
        behind = torch.where(index.left > 1, torch.cat([before[1:], before[:1]]), last)
    open_ended = (index.left > 1) | truncated[index.sequence]
    behind = torch.where(open_ended, behind, torch.zeros_like(behind))
    delta = rewards.to(dtype) + gamma * behind - before
    advantages = doubled(delta, index, gamma * lam)
    return advantages, advantages + before
