"""Seconds to generate the completions of a step.

An engine decodes all sequences that its cache holds, one token each at a time; others wait. The
last few sequences are slow, because each token reads all weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from slurmrl.config.allocation import Allocation
from slurmrl.plan.estimates.hardware import HALF, Machine
from slurmrl.plan.estimates.pass_seconds import Seconds
from slurmrl.plan.estimates.shape import (
    ModelShape,
    expert_tp,
    forward_flops_per_token,
    layer_parameters,
    parameters,
)

POINTS: Final = 64
"""Lengths at which the number of unfinished sequences is evaluated."""
BISECTIONS: Final = 60
STEEPEST: Final = 500.0
"""Rate of a distribution on [0, 1] whose mean is 1/500."""


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of completions from 0 to ``most`` tokens, with this ``mean``.

    It is the truncated exponential distribution, which has the largest entropy of all with these
    bounds and this mean.
    """

    mean: float
    most: int

    def longer(self, tokens: float) -> float:
        """Return the share of completions that have more than ``tokens`` tokens."""
        if tokens >= self.most:
            return 0.0
        place, rate = tokens / self.most, self._rate
        if abs(rate) < 1e-6:
            return 1 - place
        return math.expm1(-rate * (1 - place)) / math.expm1(-rate) * math.exp(-rate * place)

    def exceeded_by(self, share: float) -> float:
        """Return the tokens that this share of completions exceeds (the inverse of `longer`)."""
        rate = self._rate
        if abs(rate) < 1e-6:
            return (1 - share) * self.most
        return -math.log1p((1 - share) * math.expm1(-rate)) / rate * self.most

    @cached_property
    def _rate(self) -> float:
        """Rate of the same distribution on [0, 1]; negative if the mean is above the middle."""
        least = 1 / STEEPEST
        wanted = min(max(self.mean / self.most, least), 1 - least)
        low, high = -STEEPEST, STEEPEST
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(middle) > wanted else (low, middle)
        return low


def _mean(rate: float) -> float:
    """Mean of the truncated exponential distribution on [0, 1]."""
    return 0.5 if abs(rate) < 1e-6 else 1 / rate - 1 / math.expm1(rate)


class EngineCosts(NamedTuple):
    """Seconds of the host for each token of a batch and of each sequence; the GPU waits."""

    batch: float
    row: float = 1e-5


ENGINES: Final[Mapping[str, EngineCosts]] = {
    "sglang": EngineCosts(1e-3),
    "vllm": EngineCosts(1e-3),
}


@dataclass(frozen=True, kw_only=True)
class DecodeJob:
    """The sequences that one copy of a model generates; ``group`` of them share a prompt."""

    shape: ModelShape
    allocation: Allocation
    sequences: float
    prompt: float
    """Mean tokens of a prompt."""
    group: int
    lengths: LengthDistribution
    cache_tokens: float
    """Tokens that fit into the cache."""
    width: int = HALF
    """Bytes of an element."""


def generation(job: DecodeJob, machine: Machine) -> Seconds:
    """Return the seconds until the last sequence has ended."""
    mean = job.lengths.mean
    rows = min(job.sequences, max(job.cache_tokens / (job.prompt + mean), 1.0))
    waiting = max(job.sequences - rows, 0.0)
    full = waiting / rows * mean * token_seconds(job, machine, rows, job.prompt + mean / 2)
    flops = job.sequences / job.group * job.prompt * forward_flops_per_token(job.shape, "lm")
    tp = job.allocation.sizes["tp"]
    share = machine.efficiency.of_product(job.shape.queries / tp)
    parts = min(job.allocation.sizes["pp"], max(job.sequences / job.group, 1.0))
    prefill = flops / tp / parts / machine.flops(share, job.width)
    return {"prefill": prefill, "decode": full + _until_the_last(job, machine, rows)}


def _until_the_last(job: DecodeJob, machine: Machine, rows: float) -> float:
    """Seconds of a batch of ``rows`` sequences that begin together."""
    width, seconds = job.lengths.most / POINTS, 0.0
    for point in range(POINTS):
        reached = (point + 0.5) * width
        share = job.lengths.longer(reached)
        left = rows * share
        any_left = 1.0 if left >= 1 else 1 - math.pow(1 - share, rows)
        seconds += (
            any_left * width * token_seconds(job, machine, max(left, 1.0), job.prompt + reached)
        )
    return seconds


def token_seconds(job: DecodeJob, machine: Machine, rows: float, context: float) -> float:
    """Return the seconds of one token of ``rows`` sequences that have ``context`` tokens each."""
    shape, tp, pp = job.shape, job.allocation.sizes["tp"], job.allocation.sizes["pp"]
    streamed = machine.gpu.bytes_per_s * machine.efficiency.decoding
    own = rows / min(pp, max(rows, 1.0))
    """Sequences of one of the parts that the stages decode at a time; each part passes them all."""
    weights = _read_elements(job, own) * job.width / streamed
    share = machine.efficiency.products
    products = own * forward_flops_per_token(shape, "lm") / tp / machine.flops(share, job.width)
    keys = 2 * shape.layers * shape.kv_heads_of_rank(tp) * shape.head_dim * job.width
    rates = machine.efficiency
    costs = ENGINES.get(job.allocation.backend, EngineCosts(rates.token, rates.row))
    seconds = max(weights, products) + own * context * keys / streamed
    seconds += pp * (costs.batch + costs.row * own)
    if tp > 1:
        sent = 2 * own * shape.hidden * job.width * (tp - 1) / tp / machine.ring(tp, 1)
        seconds += 2 * shape.layers * (machine.latency(tp, 1) + sent)
    if pp > 1:
        seconds += pp * machine.latency(pp, tp)
    return seconds


def _read_elements(job: DecodeJob, rows: float) -> float:
    """Elements of the weights that a token of ``rows`` sequences reads on a rank of each stage.

    It reads only the experts that a token chose, and only some rows of the embedding.
    """
    shape, tp = job.shape, job.allocation.sizes["tp"]
    whole = replace(job.allocation, sizes={**job.allocation.sizes, "pp": 1})
    own = parameters(shape, whole, "lm")
    dense = own.dense - (0 if shape.tied else shape.vocabulary * shape.hidden / tp)
    if not shape.experts:
        return dense
    chosen = 1 - math.pow(1 - shape.experts_per_token / shape.experts, rows)
    of_layer = layer_parameters(shape, whole, moe=True).experts
    split = tp // expert_tp(job.allocation)  # servers split each expert over the tensor ranks
    return dense + shape.expert_layers * of_layer * chosen / split
