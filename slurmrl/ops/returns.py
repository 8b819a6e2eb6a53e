"""Estimators built on the scan of ``scan.py``: returns, V-trace, and advantages of padded rows.

T packed steps, S sequences; B rows of L steps in padded batches. As in ``packed_gae``, inputs are
float32, float64, bfloat16 or float16; results are float64 for float64 inputs, else float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.ops.checks import (
    FLOATS,
    check_first,
    check_offsets,
    check_share,
    check_tensor,
    check_vector,
)
from slurmrl.ops.gae import packed_gae
from slurmrl.ops.scan import SequenceIndex, discounted_sums


def discounted_returns(
    rewards: Tensor, cu_seqlens: Tensor, gamma: float, bootstrap_values: Tensor | None = None
) -> Tensor:
    """R_t = r_t + gamma R_{t+1} [T]; beyond a sequence's end R is ``bootstrap_values`` [S] or 0."""
    check_first("rewards", rewards, FLOATS)
    check_offsets("cu_seqlens", cu_seqlens, len(rewards), rewards.device)
    check_share("gamma", gamma)
    if bootstrap_values is not None:
        sequences = len(cu_seqlens) - 1
        check_vector(
            "bootstrap_values", bootstrap_values, sequences, (rewards.dtype,), rewards.device
        )
    return discounted_sums(rewards, cu_seqlens, gamma, tail=bootstrap_values)


def lambda_returns(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    """G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}) [T] (Sutton and Barto 2018, eq. 12.20).

    Arguments as for ``packed_gae``, whose returns these are.
    """
    return packed_gae(rewards, values, cu_seqlens, truncated, gamma, lam, bootstrap_values)[1]


def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    bootstrap_values: Tensor,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages (Espeholt et al. 2018, "IMPALA", eq. 1).

    v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}) with rho = min(rho_clip, ratio),
    c = lam min(c_clip, ratio), delta_t = r_t + gamma V_{t+1} - V_t; the advantages are
    rho_t (r_t + gamma v_{t+1} - V_t).

    :param log_ratios: [T] log(new probability / old probability) of each action.
    :param rewards, values: [T].
    :param bootstrap_values: [S], values of the final states; 0 where a sequence terminated.
    """
    check_first("log_ratios", log_ratios, FLOATS)
    steps, device = len(log_ratios), log_ratios.device
    check_offsets("cu_seqlens", cu_seqlens, steps, device)
    check_vector("rewards", rewards, steps, FLOATS, device)
    check_vector("values", values, steps, FLOATS, device)
    check_vector("bootstrap_values", bootstrap_values, len(cu_seqlens) - 1, FLOATS, device)
    check_share("gamma", gamma)
    check_share("lam", lam)
    index = SequenceIndex(cu_seqlens, steps)
    ratios, rewards, values, ends = _wide(log_ratios, rewards, values, bootstrap_values)
    ratios = ratios.exp()
    rho, c = ratios.clamp(max=rho_clip), lam * ratios.clamp(max=c_clip)
    ends = ends[index.sequence]
    delta = rho * (rewards + gamma * _following(values, ends, index) - values)
    targets = values + discounted_sums(delta, cu_seqlens, gamma, decay=c)
    return targets, rho * (rewards + gamma * _following(targets, ends, index) - values)


def padded_gae_overlapping(
    rewards: Tensor, values: Tensor, dones: Tensor, truncated: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of rows in which the first state of the next episode replaces the
    final state of an episode.

    ``dones[:, t+1]``: the episode terminated with step t, so the next value does not count.
    ``truncated[:, t+1]``: the episode was truncated after step t. The row lacks the value of the
    truncated state, so step t has advantage 0.

    :param rewards: [B, L]. :param values: [B, L+1]. :param dones, truncated: bool [B, L+1].
    """
    _check_rows(rewards, values, {"dones": dones, "truncated": truncated}, gamma, lam)
    rewards, values = _wide(rewards, values)
    continues = ~dones[:, 1:]
    counts = ~truncated[:, 1:]
    delta = _deltas(rewards, values, continues, gamma)
    delta = torch.where(counts, delta, torch.zeros_like(delta))
    return _of_rows(delta, values, continues & counts, gamma * lam)


def padded_gae(
    rewards: Tensor, values: Tensor, on_reset: Tensor, truncated: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of rows in which the final state of an episode has a step of its own.

    ``on_reset[:, t]``: step t is the first of an episode. ``truncated[:, t]``: step t is the state
    in which an episode was truncated; the step before it bootstraps from its value.

    :param rewards: [B, L]. :param values: [B, L+1]. :param on_reset, truncated: bool [B, L+1].
    """
    _check_rows(rewards, values, {"on_reset": on_reset, "truncated": truncated}, gamma, lam)
    rewards, values = _wide(rewards, values)
    continues = ~on_reset[:, 1:]
    delta = _deltas(rewards, values, continues, gamma)
    return _of_rows(delta, values, continues & ~truncated[:, 1:], gamma * lam)


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: float64 if any of them is, else float32."""
    any_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return [tensor.to(torch.float64 if any_double else torch.float32) for tensor in tensors]


def _following(x: Tensor, ends: Tensor, index: SequenceIndex) -> Tensor:
    """x_{t+1} [T], with ``ends`` at each sequence's last step."""
    return torch.where(index.left > 1, torch.cat([x[1:], x[:1]]), ends)


def _check_rows(
    rewards: Tensor, values: Tensor, flags: dict[str, Tensor], gamma: float, lam: float
) -> None:
    if rewards.dim() != 2:
        raise UsageError(f"rewards must have shape [B, L], not {list(rewards.shape)}")
    rows, steps = rewards.shape
    check_tensor("rewards", rewards, (rows, steps), FLOATS, rewards.device)
    check_tensor("values", values, (rows, steps + 1), FLOATS, rewards.device)
    for name, tensor in flags.items():
        check_tensor(name, tensor, (rows, steps + 1), (torch.bool,), rewards.device)
    check_share("gamma", gamma)
    check_share("lam", lam)


def _deltas(rewards: Tensor, values: Tensor, continues: Tensor, gamma: float) -> Tensor:
    following = torch.where(continues, values[:, 1:], torch.zeros_like(values[:, 1:]))
    return rewards + gamma * following - values[:, :-1]


def _of_rows(delta: Tensor, values: Tensor, decay: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    rows, steps = delta.shape
    cu_seqlens = torch.arange(rows + 1, device=delta.device) * steps
    flat = delta.flatten()
    sums = discounted_sums(flat, cu_seqlens, factor, decay=decay.flatten().to(flat.dtype))
    advantages = sums.view(rows, steps)
    return advantages, advantages + values[:, :-1]
