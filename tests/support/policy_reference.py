"""A step of policy gradients by loops over single tokens in float64, from the papers' formulas
(docs/algorithms.md). Models are tables: logits by the previous token, values by the token itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

Stats = dict[str, float]


@dataclass
class Completion:
    """A sequence; lists have an entry for each of its tokens."""

    ids: list[int]
    read: list[bool]
    """Whether the policy has read a token instead of writing it."""
    behavior: list[float]
    """Log-probabilities of generation."""
    recomputed: list[float]
    reference: list[float]
    values: list[float]
    turns: list[float] | None
    reward: float
    finished: bool

    @property
    def written(self) -> list[int]:
        return [place for place, read in enumerate(self.read) if not read]


@dataclass
class Prompt:
    name: str
    completions: list[Completion]
    greedy: Completion | None = None


@dataclass
class Estimates:
    """Estimates of the sampled tokens of each completion, by its ``id``."""

    advantages: dict[int, list[float]]
    returns: dict[int, list[float]]
    old_values: dict[int, list[float]]


@dataclass
class Reference:
    settings: Any
    prompts: list[Prompt]
    limit: int
    """Maximum number of tokens that the policy may write."""
    temperature: float
    kl_coef: float
    recomputes: bool

    def old(self, completion: Completion) -> list[float]:
        return completion.recomputed if self.recomputes else completion.behavior

    def trained(self, completion: Completion) -> bool:
        """Return whether the completion's tokens are in the losses."""
        counts = completion.finished or not self.settings.mask_truncated
        return bool(completion.written) and counts

    def completions(self) -> Iterator[Completion]:
        """Return the completions that have a token."""
        for prompt in self.prompts:
            yield from (each for each in prompt.completions if each.written)

    def estimates(self) -> Estimates:
        if self.settings.advantage.endswith(("group", "leave_one_out", "batch")):
            return self._of_completions()
        found = Estimates({}, {}, {})
        batch = [sum(self._token_rewards(each)) for each in self.completions()]
        for prompt in self.prompts:
            base = 0.0 if prompt.greedy is None else self.score(prompt.greedy)
            group = [c for c in prompt.completions if c.written]
            own = [sum(self._token_rewards(each)) for each in group]
            unit = self._unit(own if self.settings.advantage_std == "group" else batch, about=0.0)
            for each in group:
                if self.settings.advantage == "gae":
                    advantages, returns = self._generalized(each)
                    found.old_values[id(each)] = [each.values[t - 1] for t in each.written]
                else:
                    returns = self._discounted(self._token_rewards(each))
                    advantages = [(value - base) / unit for value in returns]
                found.advantages[id(each)], found.returns[id(each)] = advantages, returns
        return found

    def score(self, completion: Completion) -> float:
        s, made = self.settings, completion.reward
        if s.overlong_buffer is not None:
            beyond = len(completion.written) - (self.limit - s.overlong_buffer)
            made -= s.overlong_penalty * min(max(beyond / s.overlong_buffer, 0.0), 1.0)
        made = (made - s.reward_bias) * s.reward_scaling
        if s.reward_clip is not None:
            made = min(max(made, -s.reward_clip), s.reward_clip)
        return made if completion.finished or not s.mask_no_eos_with_zero else 0.0

    def _token_rewards(self, completion: Completion) -> list[float]:
        s = self.settings
        old, places = self.old(completion), completion.written
        rewards = [0.0] * len(places)
        if s.kl.coef > 0 and s.kl.where == "reward":
            for number, t in enumerate(places):
                x = old[t] - completion.reference[t]
                rewards[number] -= self.kl_coef * kl_estimate(x, s.kl.estimator)
        rest = self.score(completion)
        if completion.turns is not None and (completion.finished or not s.mask_no_eos_with_zero):
            for number, t in enumerate(places):
                part = completion.turns[t] * s.reward_scaling
                rewards[number] += part
                rest -= part
        rewards[-1] += rest
        return rewards

    def _discounted(self, rewards: Sequence[float]) -> list[float]:
        returns: list[float] = []
        for reward in reversed(rewards):
            returns.insert(0, reward + self.settings.discount * (returns[0] if returns else 0.0))
        return returns

    def _generalized(self, completion: Completion) -> tuple[list[float], list[float]]:
        """Return advantages by Schulman et al. 2016, and their sums with the values."""
        s, places = self.settings, completion.written
        rewards = self._token_rewards(completion)
        before = [completion.values[t - 1] for t in places]
        after = [*before[1:], 0.0 if completion.finished else completion.values[-1]]
        carry, advantages = 0.0, [0.0] * len(places)
        for number in reversed(range(len(places))):
            delta = rewards[number] + s.discount * after[number] - before[number]
            carry = delta + s.discount * s.gae_lambda * carry
            advantages[number] = carry
        return advantages, [a + v for a, v in zip(advantages, before, strict=True)]

    def _of_completions(self) -> Estimates:
        s, found = self.settings, Estimates({}, {}, {})
        totals = {id(each): sum(self._token_rewards(each)) for each in self.completions()}
        batch = list(totals.values())
        for prompt in self.prompts:
            group = [each for each in prompt.completions if each.written]
            own = [totals[id(each)] for each in group]
            for number, each in enumerate(group):
                others = own[:number] + own[number + 1 :]
                place = batch.index(own[number])
                all_others = batch[:place] + batch[place + 1 :]
                baseline = {
                    "group": fmean(own),
                    "leave_one_out": fmean(others or own),
                    "batch": fmean(batch),
                    "batch_leave_one_out": fmean(all_others or batch),
                }[s.advantage]
                unit = self._unit(own if s.advantage_std == "group" else batch)
                advantage = (own[number] - baseline) / unit if unit else 0.0
                found.advantages[id(each)] = [advantage] * len(each.written)
                found.returns[id(each)] = [own[number]] * len(each.written)
        return found

    def _unit(self, returns: Sequence[float], about: float | None = None) -> float:
        """Return the divisor of the advantages among these returns."""
        s = self.settings
        if s.advantage_std == "none":
            return 1.0
        return deviation(returns, unbiased=s.std_unbiased, about=about) + s.std_epsilon


def kl_estimate(x: float, estimator: str) -> float:
    return {"k1": x, "k2": x * x / 2.0, "k3": exp(-x) - 1.0 + x}[estimator]


def deviation(
    values: Sequence[float], *, unbiased: bool = False, about: float | None = None
) -> float:
    if not values:
        return 0.0
    mean = fmean(values) if about is None else about
    degrees = max(len(values) - 1, 1) if unbiased else len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / degrees)


def whitened(estimates: Estimates) -> dict[int, list[float]]:
    flat = [value for row in estimates.advantages.values() for value in row]
    mean, unit = fmean(flat), sqrt(deviation(flat) ** 2 + 1e-8)
    return {
        key: [(value - mean) / unit for value in row] for key, row in estimates.advantages.items()
    }


def corrections(settings: Any, completion: Completion) -> list[float]:
    """Return the importance weight of each sampled token; 0 for rejected tokens."""
    own = [completion.recomputed[t] - completion.behavior[t] for t in completion.written]
    accepted = [within(settings, value) for value in compared(settings, own)]
    return [w * keep for w, keep in zip(importance_weights(settings, own), accepted, strict=True)]


def importance_weights(settings: Any, logs: list[float]) -> list[float]:
    if settings.correction in (None, "none"):
        return [1.0] * len(logs)
    if settings.correction_level == "sequence":
        logs = [sum(logs)] * len(logs)
    elif settings.correction_level == "geometric":
        logs = [fmean(logs)] * len(logs)
    weights = [exp(x) for x in logs]
    low, high = settings.correction_lower, settings.correction_upper
    if settings.correction == "truncate":
        return [min(max(weight, low), high) for weight in weights]
    if settings.correction == "mask":
        return [weight if low <= weight <= high else 0.0 for weight in weights]
    return weights


def compared(settings: Any, logs: list[float]) -> list[float]:
    """Return the values that a rejection compares with its bounds, for each token."""
    by = settings.reject_by
    values = {
        None: logs,
        "ratio": logs,
        "k1": [-x for x in logs],
        "k2": [x * x / 2 for x in logs],
        "k3": [exp(x) - 1 - x for x in logs],
    }[by]
    over = {"mean": fmean, "sum": sum, "max": max}
    if settings.reject_over != "token":
        values = [over[settings.reject_over](values)] * len(values)
    return [exp(value) for value in values] if by == "ratio" else values


def within(settings: Any, value: float) -> bool:
    low, high = settings.reject_lower, settings.reject_upper
    return (low is None or value >= low) and (high is None or value <= high)


def mismatch(training: Sequence[float], generation: Sequence[float]) -> Stats:
    ratios = [exp(p - q) for p, q in zip(training, generation, strict=True)]
    k1 = fmean(q - p for p, q in zip(training, generation, strict=True))
    return {
        "mismatch/kl": fmean(ratios) - 1.0 + k1,
        "mismatch/kl_k1": k1,
        "mismatch/ratio_max": max(ratios),
        "mismatch/effective_sample_size": sum(ratios) ** 2
        / (len(ratios) * sum(ratio**2 for ratio in ratios)),
    }


def surrogate(s: Any, ratio: Tensor, logp: Tensor, advantage: float) -> tuple[Tensor, bool]:
    """Return the loss of a token, and whether a bound changes it."""
    high = s.clip_ratio if s.clip_ratio_high is None else s.clip_ratio_high
    least, most, r = 1.0 - s.clip_ratio, 1.0 + high, ratio.item()
    if s.objective == "unclipped":
        return -advantage * ratio, False
    if s.objective == "sapo":
        tau = s.sapo_tau_positive if advantage > 0 else s.sapo_tau_negative
        return -advantage * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)), False
    if s.objective == "cispo":
        return -advantage * min(max(r, least), most) * logp, not least <= r <= most
    constant = None  # The bound, if it replaces the ratio.
    if advantage > 0 and r > most:
        constant = most
    elif advantage < 0 and r < least:
        constant = least
    elif advantage < 0 and s.dual_clip is not None and r > s.dual_clip:
        constant = s.dual_clip
    if constant is None:
        return -advantage * ratio, False
    return 0.0 * ratio - advantage * constant, True
