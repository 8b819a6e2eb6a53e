"""The actor's objective against float64 loops over single tokens, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.algorithms.policy.objective import PolicyTargets, kl_estimate, policy_loss
from slurmrl.algorithms.policy.sections import Objective
from slurmrl.algorithms.policy.updates import LOSS_WEIGHTS, item_shares, token_weights
from slurmrl.algorithms.sequences import Sequences
from slurmrl.data.sample import SequenceSample

LENGTHS = [5, 2, 4, 1, 3]
MASK = torch.tensor([0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1]).bool()
"""Responses of 4, 1, 2 and 2 tokens, and a sequence without a response."""
SEQUENCE = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
RATIOS = ("token", "sequence", "sequence_token")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {},
    "clip-higher": {"clip_ratio": 0.1, "clip_ratio_high": 2.0},
    "dual-clip": {"dual_clip": 1.05},
    "unclipped": {"objective": "unclipped"},
    "cispo": {"objective": "cispo", "clip_ratio": 1.0, "clip_ratio_high": 0.3},
    "sapo": {"objective": "sapo", "sapo_tau_positive": 0.7, "sapo_tau_negative": 2.0},
}


def noise(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(MASK), generator=generator, dtype=torch.float64)


LOGP, OLD, ENTROPY, REF, CORRECTIONS = (noise(seed) for seed in range(5))
ADVANTAGES = noise(11)


def sequences() -> Sequences:
    cuts = torch.tensor([0, *LENGTHS]).cumsum(0)
    return Sequences.of(cuts, torch.device("cpu"))


def own(sequence: int) -> list[int]:
    """The response tokens of a sequence."""
    return [t for t in range(len(MASK)) if SEQUENCE[t] == sequence and MASK[t]]


def ratio_of(logp: list[float], t: int, level: str) -> float:
    tokens = [t] if level == "token" else own(SEQUENCE[t])
    return math.exp(sum(logp[u] - float(OLD[u]) for u in tokens) / len(tokens))


def token_loss(settings: Objective, ratio: float, logp: float, advantage: float) -> float:
    """The definitions of the papers, as functions of the ratio and the log-probability."""
    low, high = 1 - settings.clip_ratio, 1 + (settings.clip_ratio_high or settings.clip_ratio)
    bounded = min(max(ratio, low), high)
    if settings.objective == "unclipped":
        return -ratio * advantage
    if settings.objective == "cispo":
        return -bounded * advantage * logp
    if settings.objective == "sapo":
        tau = settings.sapo_tau_positive if advantage > 0 else settings.sapo_tau_negative
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    gain = min(ratio * advantage, bounded * advantage)
    if settings.dual_clip is not None and advantage < 0:
        gain = max(gain, settings.dual_clip * advantage)
    return -gain


def targets(**changes: Any) -> PolicyTargets:
    return PolicyTargets(
        **{"old_logp": OLD, "advantages": ADVANTAGES, "mask": MASK}
        | {"sequences": sequences(), **changes}
    )


def loop(settings: Objective, at: Tensor, frozen: Tensor | None = None) -> float:
    """The sum over tokens.

    ``frozen`` is what the ratio is computed from where no gradient flows through it.
    """
    total = 0.0
    for t in MASK.nonzero().flatten().tolist():
        moving = at.tolist()
        ratio = ratio_of(moving, t, settings.ratio)
        if settings.ratio == "sequence_token" and frozen is not None:
            mean = ratio_of(frozen.tolist(), t, "sequence")
            ratio = mean * math.exp(moving[t] - float(frozen[t]))
        if settings.objective == "cispo" and frozen is not None:
            ratio = ratio_of(frozen.tolist(), t, settings.ratio)
        total += token_loss(settings, ratio, moving[t], float(ADVANTAGES[t]))
    return total


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_surrogate_and_its_gradient_are_those_of_its_definition(name: str, ratio: str) -> None:
    """Each objective, at each level of the ratio, is the sum of its paper's loss over tokens, and
    its gradient that of finite differences with the detached parts held.
    """
    settings = Objective(**OBJECTIVES[name], ratio=ratio)
    logp = LOGP.clone().requires_grad_()
    loss, _ = policy_loss(logp, ENTROPY, targets(), settings)
    assert float(loss.detach()) == pytest.approx(loop(settings, LOGP), abs=1e-12)
    loss.backward()
    assert logp.grad is not None
    step = 1e-6
    for t in range(len(MASK)):
        moves = torch.zeros_like(LOGP)
        moves[t] = step
        around = [loop(settings, LOGP + side * moves, LOGP) for side in (1, -1)]
        assert float(logp.grad[t]) == pytest.approx((around[0] - around[1]) / (2 * step), abs=1e-7)


def test_each_objective_and_option_changes_the_gradient() -> None:
    gradients = set()
    choices = [*OBJECTIVES.values(), {"ratio": "sequence"}, {"ratio": "sequence_token"}]
    for options in choices:
        logp = LOGP.clone().requires_grad_()
        policy_loss(logp, ENTROPY, targets(), Objective(**options))[0].backward()
        assert logp.grad is not None
        gradients.add(tuple(round(value, 9) for value in logp.grad.tolist()))
    assert len(gradients) == len(choices)


def test_equal_advantages_give_both_sequence_ratios_one_gradient() -> None:
    """GSPO and GSPO-token agree where a response has one advantage (section 4.3 of the paper)."""
    advantages = torch.tensor([(-1.0) ** number * (1 + number) for number in SEQUENCE]).double()
    gradients = []
    for ratio in ("sequence", "sequence_token"):
        logp = LOGP.clone().requires_grad_()
        settings = Objective(ratio=ratio, clip_ratio=0.5)
        policy_loss(logp, ENTROPY, targets(advantages=advantages), settings)[0].backward()
        gradients.append(logp.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("options", "advantage", "ratio", "slope"),
    [
        ({}, 1.0, 1.5, 0.0),
        ({}, -1.0, 1.5, 1.5),
        ({}, 1.0, 0.5, -0.5),
        ({}, -1.0, 0.5, 0.0),
        ({"clip_ratio_high": 0.6}, 1.0, 1.5, -1.5),
        ({"dual_clip": 3.0}, -1.0, 2.9, 2.9),
        ({"dual_clip": 3.0}, -1.0, 3.1, 0.0),
        ({"dual_clip": 3.0}, 1.0, 0.5, -0.5),
        ({"objective": "unclipped"}, 2.0, 5.0, -10.0),
        ({"objective": "cispo"}, 1.0, 5.0, -1.2),
        ({"objective": "cispo"}, -1.0, 0.1, 0.8),
        ({"objective": "sapo"}, 3.0, 1.0, -3.0),
        ({"objective": "sapo"}, -3.0, 1.0, 3.0),
        ({"objective": "sapo"}, 1.0, math.exp(70), 0.0),
    ],
)
def test_the_gradient_of_one_token(
    options: dict[str, Any], advantage: float, ratio: float, slope: float
) -> None:
    """Computed by hand: where a bound takes the gradient away, and where it does not."""
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    alone = Sequences(torch.zeros(1, dtype=torch.int64), 1)
    mask = torch.ones(1, dtype=torch.bool)
    loss, _ = policy_loss(
        logp,
        torch.zeros(1),
        PolicyTargets(torch.zeros(1), torch.tensor([advantage]), mask, alone),
        Objective(**options),
    )
    loss.backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(slope)


def test_statistics_are_sums_over_tokens_that_count() -> None:
    kept = MASK & (torch.arange(len(MASK)) != 3)
    corrections = torch.where(torch.arange(len(MASK)) == 9, 0.0, CORRECTIONS.abs())
    corrections = torch.where(MASK, corrections, 0.0)
    weights = noise(7).abs()
    settings = Objective(entropy_coef=0.5)
    loss, stats = policy_loss(
        LOGP,
        ENTROPY,
        targets(kept=kept, corrections=corrections, weights=weights, ref_logp=REF),
        settings,
        kl_coef=0.3,
    )
    expected = dict.fromkeys(stats, 0.0)
    for t in MASK.nonzero().flatten().tolist():
        ratio, weight = math.exp(float(LOGP[t] - OLD[t])), float(weights[t])
        gain = float(ADVANTAGES[t])
        value = token_loss(settings, ratio, float(LOGP[t]), gain) * float(corrections[t])
        x = float(LOGP[t] - REF[t])
        expected["actor_loss"] += value * weight * bool(kept[t])
        expected["kl_loss"] += (math.exp(-x) - 1 + x) * weight
        expected["entropy"] += float(ENTROPY[t])
        expected["importance_ratio"] += ratio
        expected["clip_fraction"] += ratio > 1.2 if gain > 0 else ratio < 0.8
        expected["approx_kl"] += ratio - 1 - math.log(ratio)
        expected["approx_kl_k1"] -= math.log(ratio)
        expected["correction_weight"] += float(corrections[t])
        expected["correction_masked"] += float(corrections[t]) == 0
        expected["m2_masked"] += not kept[t]
    entropies = sum(float(ENTROPY[t] * weights[t]) for t in MASK.nonzero().flatten().tolist())
    whole = expected["actor_loss"] - 0.5 * entropies + 0.3 * expected["kl_loss"]
    assert float(loss) == pytest.approx(whole)
    expected["actor/loss"] = whole
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(expected)


def test_nothing_to_learn_from_is_a_loss_of_zero() -> None:
    x = LOGP.clone().requires_grad_()
    none = torch.zeros_like(MASK)
    for options in OBJECTIVES.values():
        loss, _ = policy_loss(x, x, targets(mask=none), Objective(**options, ratio="sequence"))
        loss.backward()
        assert float(loss.detach()) == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_kl_estimators_and_their_gradients_in_the_mean() -> None:
    """Over all tokens of a vocabulary, weighted by the policy: k1 and k3 have the mean
    KL(policy || reference). The gradient of k1 vanishes, that of k2 is the one of
    KL(policy || reference), and that of k3 the one of KL(reference || policy).
    """
    generator = torch.Generator().manual_seed(1)
    logits, other = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    ref = other.log_softmax(0)

    def gradient(of: Any) -> Tensor:
        x = logits.clone().requires_grad_()
        found: Tensor = torch.autograd.grad(of(x.log_softmax(0)), x)[0]
        return found

    policy = logits.log_softmax(0).exp()
    reverse = gradient(lambda logp: (logp.exp() * (logp - ref)).sum())
    forward = gradient(lambda logp: (ref.exp() * (ref - logp)).sum())
    expected = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward}
    for estimator, slope in expected.items():
        found = gradient(lambda logp, k=estimator: (policy * kl_estimate(logp, ref, k)).sum())
        torch.testing.assert_close(found, slope)
    exact = float((policy * (policy.log() - ref)).sum())
    for estimator in ("k1", "k3"):
        mean = float((policy * kl_estimate(policy.log(), ref, estimator)).sum())
        assert mean == pytest.approx(exact)
    assert float(kl_estimate(policy.log(), ref, "k3").min()) >= 0.0
    half = kl_estimate(torch.tensor([2.0]), torch.tensor([1.0]), "k2")
    assert float(half) == 0.5


AGGREGATED = {
    "tokens": sum(float(LOGP[t]) for t in MASK.nonzero().flatten()) / 9,
    "sequences": sum(sum(float(LOGP[t]) for t in own(s)) / len(own(s)) for s in range(5) if own(s))
    / 4,
    "constant": sum(float(LOGP[t]) for t in MASK.nonzero().flatten()) / 10 / 4,
}
"""Means of LOGP over tokens; over responses of means; over responses of sums by 10."""


@pytest.mark.parametrize("groups", [[1, 1, 1, 1, 1], [2, 1, 2], [5]])
@pytest.mark.parametrize("aggregation", AGGREGATED)
def test_an_aggregation_does_not_depend_on_how_a_batch_is_cut(
    aggregation: str, groups: list[int]
) -> None:
    """Weighted sums and denominators of items add up to the definition, whether each sequence is an
    item of its own or several form a group, and whichever part an item is in.
    """
    rows, start = [], 0
    for count in groups:
        rows.append(LENGTHS[start : start + count])
        start += count
    ids = tuple(map(str, range(len(rows))))
    data = {"mask": MASK, "logp": LOGP}
    sample = SequenceSample(ids, dict.fromkeys(data, rows), data=dict(data))
    total = torch.zeros(3, dtype=torch.float64)
    for index in reversed(range(len(rows))):
        part = sample.take([index])
        mask, logp = part.tensor("mask"), part.tensor("logp")
        cut = Sequences.of(part.cu_seqlens("mask"), torch.device("cpu"))
        weights = token_weights(mask, cut, aggregation, 10)
        losses = torch.where(mask, logp, 0.0)
        loss = losses.sum() if weights is None else (losses * weights.double()).sum()
        part.lengths[LOSS_WEIGHTS], part.data[LOSS_WEIGHTS] = part.lengths["mask"], weights
        shares = item_shares(part, "mask", aggregation)
        total += torch.stack([loss, *shares.sum(0)])
    assert float(total[0] / total[1]) == pytest.approx(AGGREGATED[aggregation], rel=1e-6)
    assert float(total[2]) == float(MASK.sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "sapo", "dual_clip": 3.0}, "dual_clip is not allowed with objective: sapo"),
        ({"objective": "unclipped", "clip_ratio_high": 0.3}, "clip_ratio_high is not allowed"),
        ({"objective": "sapo", "clip_ratio": 0.3}, "clip_ratio is not allowed with"),
        ({"sapo_tau_negative": 2.0}, "sapo_tau_negative is not allowed with objective: clip"),
        ({"aggregation_length": 9}, "aggregation_length is not allowed with aggregation: tokens"),
        ({"dual_clip": 1.0}, "greater than 1"),
    ],
)
def test_settings_that_the_objective_does_not_use_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**options)
