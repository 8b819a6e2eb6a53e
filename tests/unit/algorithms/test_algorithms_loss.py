"""The losses of values and of supervised training against loops over single tokens."""

from __future__ import annotations

import pytest
import torch

from slurmrl.algorithms.policy.objective import value_loss
from slurmrl.algorithms.sft import cross_entropy

MASK = torch.tensor([False, True, True, True, True, False])


def noise(seed: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rounding_is_not_counted_as_clipping() -> None:
    old, new, returns = torch.rand(3, 500, generator=torch.Generator().manual_seed(1)) - 0.5
    old, new = 0.19 * old, 0.19 * new
    assert (old + (new - old) != new).any()
    everything = torch.ones(500, dtype=torch.bool)
    _, stats = value_loss(new, old, returns, everything, value_clip=0.2)
    assert stats["value_clip_fraction"] == 0


@pytest.mark.parametrize("delta", [None, 0.5])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_token_by_token(clip: float | None, delta: float | None) -> None:
    values, old, returns = (noise(seed) for seed in range(3))
    values.requires_grad_()
    loss, stats = value_loss(values, old, returns, MASK, value_clip=clip, huber_delta=delta)

    def error(value: float, target: float) -> float:
        size = abs(value - target)
        if delta is None or size <= delta:
            return 0.5 * size**2
        return delta * (size - 0.5 * delta)

    def token(t: int, v: float) -> tuple[float, bool]:
        o, r = float(old[t]), float(returns[t])
        bounded = v if clip is None else o + min(max(v - o, -clip), clip)
        return max(error(v, r), error(bounded, r)), error(bounded, r) > error(v, r)

    counted = MASK.nonzero().flatten().tolist()
    found = [token(t, float(values[t].detach())) for t in counted]
    loss_value = float(loss.detach())
    assert loss_value == pytest.approx(sum(value for value, _ in found))
    assert float(stats["value_loss"]) == pytest.approx(loss_value)
    assert float(stats["value_clip_fraction"]) == sum(held for _, held in found)
    loss.backward()
    assert values.grad is not None
    step = 1e-6
    for t in counted:
        around = [token(t, float(values[t].detach()) + side * step)[0] for side in (1, -1)]
        slope = (around[0] - around[1]) / (2 * step)
        assert float(values.grad[t]) == pytest.approx(slope, abs=1e-6)


def test_cross_entropy_counts_answers_only() -> None:
    logp = torch.tensor([0.0, -1.0, -2.0])
    loss = cross_entropy(logp, torch.tensor([False, True, True]))
    assert float(loss) == 3.0
