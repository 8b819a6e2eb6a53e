"""The updates of a policy-gradient step, computed token by token (`policy_reference`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tests.support.policy_reference import (
    Completion,
    Estimates,
    Prompt,
    Reference,
    Stats,
    corrections,
    deviation,
    mismatch,
    surrogate,
    whitened,
)


@dataclass
class Totals:
    """Sums over the tokens of minibatches."""

    tokens: int = 0
    denominator: float = 0.0
    weighted: Stats = field(default_factory=dict)
    """Sums of statistics that are divided by the denominator."""
    sums: Stats = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def weigh(self, name: str, value: float) -> None:
        self.weighted[name] = self.weighted.get(name, 0.0) + value

    def join(self, other: Totals) -> None:
        self.tokens += other.tokens
        self.denominator += other.denominator
        for name, value in other.sums.items():
            self.add(name, value)
        for name, value in other.weighted.items():
            self.weigh(name, value)

    def means(self) -> Stats:
        return {
            **{name: value / self.denominator for name, value in self.weighted.items()},
            **{name: value / self.tokens for name, value in self.sums.items()},
        }


@dataclass
class ActorStep:
    """A step that trains ``table`` on the advantages of a batch."""

    reference: Reference
    table: Tensor
    lr: float
    warms_up: bool
    stats: Stats = field(default_factory=dict)
    made: int = 0
    stopped: bool = False

    def run(self, minibatches: Sequence[Sequence[Prompt]]) -> None:
        """Make the updates, up to the first one that is rejected."""
        found = self.reference.estimates()
        flat = [value for row in found.advantages.values() for value in row]
        s = self.reference.settings
        self.stats = {
            "advantages_mean": fmean(flat),
            "advantages_std": deviation(flat),
            "completions": float(sum(len(p.completions) for p in self.reference.prompts)),
        }
        if s.kl.coef > 0:
            self.stats |= self._kl()
        if self.reference.recomputes:
            self.stats |= self._mismatch(self.reference.completions())
        self.advantages = whitened(found) if s.normalize_advantages else found.advantages
        totals, norms, first = Totals(), [], True
        for minibatch in minibatches:
            if self.stopped:
                break
            completions = [c for prompt in minibatch for c in prompt.completions]
            if first and not self.reference.recomputes:
                self.stats |= self._mismatch(filter(self.reference.trained, completions))
            first = False
            loss, own = self._minibatch(completions)
            totals.join(own)
            if self._veto(own.means()):
                self.stopped = True
                break
            (gradient,) = torch.autograd.grad(loss, self.table)
            norms.append(gradient.norm().item())
            self.table = (self.table - self.lr * gradient).detach().requires_grad_()
            self.made += 1
        self.stats |= totals.means() if totals.tokens else {}
        if totals.tokens:
            self.stats |= {"actor_grad_norm": sum(norms) / max(len(norms), 1), "actor_lr": self.lr}
        self.stats |= {"actor_updates": float(self.made), "actor_skipped": 0.0}
        if s.early_stop_importance_ratio or s.early_stop_kl or self.warms_up:
            self.stats["early_stop"] = float(self.stopped and not self.warms_up)

    def _kl(self) -> Stats:
        written = [each for each in self.reference.completions() if each.written]
        logs = [
            self.reference.old(each)[t] - each.reference[t]
            for each in written
            for t in each.written
        ]
        return {
            "kl": fmean(logs),
            "kl_sequence": sum(logs) / len(written),
            "kl_coef": self.reference.kl_coef,
        }

    def _mismatch(self, completions: Iterable[Completion]) -> Stats:
        """Return the mismatch between generation and training before any update."""
        pairs = [
            (logp.item(), each.behavior[t])
            for each in completions
            for logp, t in zip(self._outputs(each)[0], each.written, strict=True)
        ]
        return mismatch([new for new, _ in pairs], [old for _, old in pairs])

    def _veto(self, means: Stats) -> bool:
        s = self.reference.settings
        limits = {"importance_ratio": s.early_stop_importance_ratio, "approx_kl": s.early_stop_kl}
        return self.warms_up or any(
            means[name] > limit for name, limit in limits.items() if limit is not None
        )

    def _outputs(self, completion: Completion) -> tuple[list[Tensor], list[Tensor]]:
        """Return the log-probability and entropy of each sampled token."""
        logps, entropies = [], []
        for t in completion.written:
            row = (self.table[completion.ids[t - 1]] / self.reference.temperature).log_softmax(-1)
            logps.append(row[completion.ids[t]])
            entropies.append(-(row.exp() * row).sum())
        return logps, entropies

    def _minibatch(self, completions: Sequence[Completion]) -> tuple[Tensor, Totals]:
        s, totals = self.reference.settings, Totals()
        kept = self._kept(completions) if s.m2_threshold is not None else None
        loss = torch.zeros((), dtype=torch.float64)
        for completion in completions:
            if completion.written and s.aggregation != "tokens":
                totals.denominator += 1.0
            if not self.reference.trained(completion):
                continue
            count = len(completion.written)
            weight = {
                "tokens": 1.0,
                "sequences": 1.0 / count,
                "constant": 1.0 / (s.aggregation_length or self.reference.limit),
            }[s.aggregation]
            totals.tokens += count
            totals.denominator += count if s.aggregation == "tokens" else 0.0
            loss = loss + weight * self._completion(completion, weight, kept, totals)
        return loss / max(totals.denominator, 1e-300), totals

    def _completion(
        self,
        completion: Completion,
        weight: float,
        kept: set[tuple[int, int]] | None,
        totals: Totals,
    ) -> Tensor:
        """Return the sum of the losses of a completion's tokens."""
        s, old = self.reference.settings, self.reference.old(completion)
        logps, entropies = self._outputs(completion)
        moved = [logp - old[t] for logp, t in zip(logps, completion.written, strict=True)]
        ratios = self._ratios(moved)
        factors = corrections(s, completion) if s.compares else None
        loss = torch.zeros((), dtype=torch.float64)
        for n, t in enumerate(completion.written):
            advantage = self.advantages[id(completion)][n]
            own, held = surrogate(s, ratios[n], logps[n], advantage)
            if factors is not None:
                own = own * factors[n]
                totals.add("correction_weight", factors[n])
                totals.add("correction_masked", float(factors[n] == 0.0))
            if kept is not None:
                dropped = (id(completion), n) not in kept
                own = own * (0.0 if dropped else 1.0)
                totals.add("m2_masked", float(dropped))
            totals.weigh("actor_loss", weight * own.item())
            own = own - s.entropy_coef * entropies[n]
            if s.kl.coef > 0 and s.kl.where == "loss":
                x = logps[n] - completion.reference[t]
                kl = x * x / 2.0 if s.kl.estimator == "k2" else torch.exp(-x) - 1.0 + x
                totals.weigh("kl_loss", weight * kl.item())
                own = own + self.reference.kl_coef * kl
            totals.weigh("actor/loss", weight * own.item())
            x = moved[n].item()
            totals.add("clip_fraction", float(held))
            totals.add("importance_ratio", ratios[n].item())
            totals.add("approx_kl_k1", -x)
            totals.add("approx_kl", exp(x) - 1.0 - x)
            totals.add("entropy", entropies[n].item())
            loss = loss + own
        return loss

    def _ratios(self, moved: Sequence[Tensor]) -> list[Tensor]:
        level = self.reference.settings.ratio
        if level == "token":
            return [x.exp() for x in moved]
        mean = torch.stack(list(moved)).mean()
        if level == "sequence":
            return [mean.exp()] * len(moved)
        return [mean.detach().exp() * (x - x.detach()).exp() for x in moved]

    def _kept(self, completions: Sequence[Completion]) -> set[tuple[int, int]]:
        """Return the tokens that M2PO keeps. Of tokens whose ratio moved in the direction of their
        advantage, it drops the furthest ones.
        """
        kept, moved = set(), []
        for completion in (each for each in completions if self.reference.trained(each)):
            old, logps = self.reference.old(completion), self._outputs(completion)[0]
            for n, (logp, t) in enumerate(zip(logps, completion.written, strict=True)):
                x, place = logp.item() - old[t], (id(completion), n)
                kept.add(place)
                if x * self.advantages[id(completion)][n] > 0:
                    moved.append((x * x, place))
        threshold = self.reference.settings.m2_threshold
        while moved and fmean(square for square, _ in moved) > threshold:
            most = max(moved)[0] * (1.0 - 1e-6)  # Drop equal squares together.
            kept -= {place for square, place in moved if square >= most}
            moved = [(square, place) for square, place in moved if square < most]
        return kept


@dataclass
class CriticStep:
    """A step that trains ``table`` on the returns of a batch. ``moments``: weight, mean and mean
    square of the earlier returns.
    """

    reference: Reference
    table: Tensor
    lr: float
    moments: tuple[float, float, float]
    stats: Stats = field(default_factory=dict)

    def run(self, minibatches: Sequence[Sequence[Prompt]]) -> None:
        found = self.reference.estimates()
        before, after = self.moments, self._after(found)
        totals, norms = Totals(), []
        for minibatch in minibatches:
            own, loss = Totals(), torch.zeros((), dtype=torch.float64)
            for completion in (c for prompt in minibatch for c in prompt.completions):
                if self.reference.trained(completion):
                    loss = loss + self._completion(completion, found, before, after, own)
            own.denominator = own.tokens
            (gradient,) = torch.autograd.grad(loss / own.tokens, self.table)
            norms.append(gradient.norm().item())
            self.table = (self.table - self.lr * gradient).detach().requires_grad_()
            totals.join(own)
        self.stats |= {"critic_updates": float(len(norms)), "critic_skipped": 0.0}
        if norms:
            self.stats |= {"critic_grad_norm": fmean(norms), "critic_lr": self.lr}
            self.stats |= totals.means()

    def _after(self, found: Estimates) -> tuple[float, float, float]:
        """Return the moments that include these returns."""
        s = self.reference.settings
        returns = [value for row in found.returns.values() for value in row]
        values = [value for row in found.old_values.values() for value in row]
        errors = [r - v for r, v in zip(returns, values, strict=True)]
        spread = deviation(returns)
        self.stats = {
            "returns_mean": fmean(returns),
            "returns_std": spread,
            "explained_variance": 1.0 - (deviation(errors) / spread) ** 2 if spread else 0.0,
        }
        if s.value_norm == "none":
            return self.moments
        old, new = self.moments[0], float(len(returns))
        if s.value_norm == "exponential":
            old, new = s.value_norm_decay * old, 1.0 - s.value_norm_decay
        squares = fmean(value**2 for value in returns)
        after = (
            old + new,
            (old * self.moments[1] + new * fmean(returns)) / (old + new),
            (old * self.moments[2] + new * squares) / (old + new),
        )
        names = ("value_norm_weight", "value_norm_mean", "value_norm_square")
        self.stats |= dict(zip(names, after, strict=True))
        return after

    def _completion(
        self,
        completion: Completion,
        found: Estimates,
        before: tuple[float, float, float],
        after: tuple[float, float, float],
        totals: Totals,
    ) -> Tensor:
        s, loss = self.reference.settings, torch.zeros((), dtype=torch.float64)
        for n, t in enumerate(completion.written):
            new = self.table[completion.ids[t - 1]]
            old = normalized(completion.values[t - 1], before)
            target = normalized(found.returns[id(completion)][n], after)
            own, held = self._error(new - target), False
            if s.value_clip is not None:
                bounded = old + (new - old).clamp(-s.value_clip, s.value_clip)
                other = self._error(bounded - target)
                held = bool(other > own) and abs(new.item() - old) > s.value_clip
                own = torch.maximum(own, other)
            totals.tokens += 1
            totals.weigh("value_loss", own.item())
            totals.add("value_clip_fraction", float(held))
            loss = loss + own
        return loss

    def _error(self, error: Tensor) -> Tensor:
        delta: Any = self.reference.settings.value_huber_delta
        if delta is None or abs(error.item()) <= delta:
            return 0.5 * error**2
        return delta * (error.abs() - 0.5 * delta)


def normalized(value: float, moments: tuple[float, float, float]) -> float:
    weight, mean, square = moments
    if not weight:
        return value
    return float((value - mean) / (max(square - mean**2, 0.0) + 1e-5) ** 0.5)
