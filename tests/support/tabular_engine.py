"""A training engine whose model is a table in float64, on ranks that are threads.

The logits of a language model depend on the previous token, and a critic's value on the token
itself. Weights follow plain gradient descent, so tests can compute a step by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import isfinite
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import MAXIMUM, LossFn, Veto

T = TypeVar("T")
DEADLINE_S = 120.0


class RankThreads:
    """Runs a function on every rank, and sums tensors over ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self._slots: list[Tensor] = [torch.empty(0)] * size

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return the results in the order of the ranks. An error ends the wait."""

        def guarded(rank: int) -> T:
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        broken = threading.BrokenBarrierError
        for error in sorted(errors, key=lambda each: isinstance(each, broken)):
            raise error
        return [future.result() for future in futures]

    def sum(self, rank: int, tensor: Tensor) -> Tensor:
        return self.reduce(rank, tensor, lambda slots: slots.sum(0))

    def reduce(self, rank: int, tensor: Tensor, joined: Callable[[Tensor], Tensor]) -> Tensor:
        self._slots[rank] = tensor.clone()
        self._barrier.wait()
        total = joined(torch.stack(self._slots))
        self._barrier.wait()
        return tensor.copy_(total)


class TabularEngine:
    """The part of `TrainEngine` that algorithms use. :param table: [V, V] logits by the previous
    token, or [V] values. :param budget: tokens of a micro-batch; a longer sequence gets a separate
    one.
    """

    def __init__(
        self, role: str, ranks: RankThreads, rank: int, table: Tensor, *, lr: float, budget: int
    ) -> None:
        self.role = role
        self.context: Any = SimpleNamespace(
            device=torch.device("cpu"), rank=rank, dp_rank=rank, dp_size=ranks.size
        )
        self.table = table.clone().requires_grad_()
        self.trained_on: list[tuple[str, ...]] = []
        """The sequences of each update on this rank."""
        self._ranks, self._lr, self._budget = ranks, lr, budget

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self._ranks.sum(self.context.rank, tensor)

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return self._ranks.reduce(self.context.rank, tensor, lambda slots: slots.amax(0))

    def forward(self, sample: SequenceSample, *, temperature: float = 1.0) -> dict[str, Tensor]:
        with torch.no_grad():
            return self._outputs(sample, temperature)

    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        denominator: float,
        *,
        temperature: float = 1.0,
        veto: Veto | None = None,
    ) -> dict[str, float]:
        self.trained_on.append(sample.ids)
        gradient = torch.zeros_like(self.table)
        totals: dict[str, Tensor] = {}
        for part in self._microbatches(sample):
            loss, stats = loss_fn(self._outputs(part, temperature), part)
            (grad,) = torch.autograd.grad(loss, self.table)
            gradient += grad
            for name, value in {**stats, "loss": loss.detach()}.items():
                join = torch.maximum if name.endswith(MAXIMUM) else torch.add
                value = value.double()
                totals[name] = join(totals[name], value) if name in totals else value
        whole = self.all_reduce_sum(torch.tensor(denominator, dtype=torch.float64))
        result = {"denominator": float(whole), "tokens": 0.0, "lr": self._lr, "skipped": 0.0}
        for name in sorted(totals):
            maximum = name.endswith(MAXIMUM)
            reduce = self.all_reduce_max if maximum else self.all_reduce_sum
            result[name] = float(reduce(totals[name].clone()))
        gradient = self.all_reduce_sum(gradient) / whole
        result["grad_norm"] = float(gradient.norm())
        result["vetoed"] = float(veto is not None and veto(result))
        assert isfinite(result["grad_norm"])
        if not result["vetoed"]:
            with torch.no_grad():
                self.table -= self._lr * gradient
        return result

    def _microbatches(self, sample: SequenceSample) -> Iterator[SequenceSample]:
        """Return micro-batches within the budget; a rank without items gets an empty one."""
        start, size = 0, 0
        for place, tokens in enumerate(sample.item_lengths("input_ids")):
            if size and size + tokens > self._budget:
                yield sample.slice(start, place)
                start, size = place, 0
            size += tokens
        yield sample.slice(start, sample.bs)

    def _outputs(self, sample: SequenceSample, temperature: float) -> dict[str, Tensor]:
        ids = sample.tensor("input_ids")
        if self.table.dim() == 1:
            return {"values": self.table[ids]}
        inner = torch.ones(len(ids), dtype=torch.bool)
        inner[sample.cu_seqlens("input_ids")[:-1].long()] = False
        before = ids.roll(1)
        logp = (self.table[before] / temperature).log_softmax(-1)
        of_token = logp.gather(1, ids[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return {
            "logp": torch.where(inner, of_token, 0.0),
            "entropy": torch.where(inner, entropy, 0.0),
        }
