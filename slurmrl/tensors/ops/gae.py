"""Generalised advantage estimation over packed sequences.

T packed steps, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slurmrl.tensors.ops.checks import (
    FLOATS,
    check_first,
    check_offsets,
    check_share,
    check_vector,
    wide,
)
from slurmrl.tensors.ops.native.load import operators
from slurmrl.tensors.ops.scan import SequenceIndex, contiguous, doubled, forward_sums


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each step: A_t = sum_i (gamma lam)^i delta_{t+i} with
    delta_t = r_t + gamma V_{t+1} - V_t, and returns A_t + V_t (Schulman et al. 2016,
    "High-dimensional continuous control using generalized advantage estimation", eq. 16).

    Differentiable in rewards and values. On CPUs the compiled form and the torch form agree bit for
    bit.

    :param rewards: [T], the concatenated steps of S sequences; float32, float64, bfloat16 or
        float16.
    :param values: of rewards' dtype. [T+S]: for each sequence the value of the state before each
        step, then of its final state. With ``bootstrap_values`` [T]: without the final states.
    :param cu_seqlens: int32 or int64 [S+1], cumulative numbers of steps; sequences may be empty.
    :param truncated: bool [S]; if False the sequence terminated, and the value of its final state
        counts as 0.
    :param gamma: discount, between 0 and 1.
    :param lam: lambda, between 0 and 1.
    :param bootstrap_values: [S] of rewards' dtype, the values of the final states.
    :return: advantages and returns, [T] each; float64 for float64 inputs, else float32.
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
        return reference(rewards, values, cu_seqlens, truncated, gamma, lam, bootstrap_values)
    advantages = torch.empty(rewards.shape, dtype=wide(rewards.dtype), device=rewards.device)
    returns = torch.empty_like(advantages)
    inputs = (rewards, values, cu_seqlens, truncated, bootstrap_values)
    native.gae(*map(contiguous, inputs), advantages, returns, gamma, lam)
    return advantages, returns


@_gae.register_fake
def _(rewards: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
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
    check_offsets("cu_seqlens", cu_seqlens, steps, rewards.device)
    sequences = len(cu_seqlens) - 1
    check_vector("truncated", truncated, sequences, (torch.bool,), rewards.device)
    if bootstrap_values is None:
        check_vector("values", values, steps + sequences, *like)
    else:
        check_vector("values", values, steps, *like)
        check_vector("bootstrap_values", bootstrap_values, sequences, *like)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rewards, values, cu_seqlens, truncated, bootstrap_values, ctx.gamma, ctx.lam = inputs
    ctx.save_for_backward(cu_seqlens, truncated)
    ctx.like_rewards, ctx.values = rewards.dtype, len(values)
    ctx.aligned = bootstrap_values is not None


def _backward(ctx: Any, grad_advantages: Tensor, grad_returns: Tensor) -> tuple[Tensor | None, ...]:
    """dr_t = sum_i (gamma lam)^i (dA + dR)_{t-i}. The value before step t gets dR_t - dr_t, the
    value after it gamma dr_t."""
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


_gae.register_autograd(_backward, setup_context=_keep)


def reference(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``packed_gae`` in pure torch."""
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
