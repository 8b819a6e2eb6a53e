"""Seconds of forward passes and optimizer steps in a layout.

The seconds are a sum of lower bounds for matrix products, attention, elementwise operations,
communication of each axis, pipeline bubbles, and the optimizer. Each bound is divided by the share
of the peak rate that runs reach. Sources of the formulas: Narayanan et al. 2021 (pipelines and
tensor parallelism), Korthikanti et al. 2022 (recomputation and sequence parallelism), Rajbhandari
et al. 2020 (sharded parameters).

In generation, each decoding step adds one token to every sequence in the cache. Other sequences
wait. The last few sequences are slow, because each step still reads all weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from slurmrl.config.allocation import Allocation
from slurmrl.plan.dataflow import Head
from slurmrl.plan.estimates.hardware import HALF, Machine
from slurmrl.plan.estimates.memory import FLOAT32
from slurmrl.plan.estimates.shape import (
    ModelShape,
    Parameters,
    expert_tp,
    layer_parameters,
    parameters,
    passes_keys,
    shard_parameters,
)

Seconds: TypeAlias = Mapping[str, float]
"""Seconds by cause. Causes are ``products``, ``attention``, ``elementwise``, ``communication`` of
split layers, ``weights`` (gathers, and reductions of gradients), ``bubble``, ``optimizer``,
``host`` (traffic with the host's memory), ``prefill`` and ``decode``."""


@dataclass(frozen=True, kw_only=True)
class PassJob:
    """The tokens that a data-parallel rank computes with a model in a layout."""

    shape: ModelShape
    allocation: Allocation
    head: Head
    tokens: float
    """Tokens of an optimizer step or of an inference call."""
    length: float
    """Mean length of a sequence in tokens."""
    microbatch: float
    """Maximum tokens of a micro-batch."""
    width: int = HALF
    """Bytes of an element."""
    sharded: bool
    """Whether weights are sharded over data-parallel ranks and gathered layer by layer."""
    sequence_parallel: bool = False
    virtual: int = 1
    repeated: float = 0.0
    """Share of a layer's forward pass that the backward pass repeats."""
    frozen: bool = False
    """Whether only adapters are trained."""
    optimizer_bytes: float = 28
    """Bytes that the optimizer moves for each element of a rank's shard."""
    rate: float = 1.0
    """Rate of matrix products, as a multiple of the rate for elements of ``width`` bytes."""
    offloaded: bool = False
    """Whether weights and optimizer state are in the host's memory."""
    small: bool = False
    """Whether sharded weights are one unit that is gathered and reduced once in a step."""


SMALL_BYTES: Final = 256 * 2**20
"""Maximum float32 bytes of a model whose sharded weights are one unit. For small models, holding
all parameters and gradients costs less than the collectives and hooks of many units."""
REPEATED: Final[Mapping[str, float]] = {"off": 0.0, "selective": 0.5, "full": 1.0}
"""Share of a layer's forward pass that each mode of activation checkpointing repeats."""


def inference(job: PassJob, machine: Machine) -> Seconds:
    """Return the seconds of a forward pass over all tokens of a data-parallel rank."""
    return _passes(job, machine, trained=False)


def training(job: PassJob, machine: Machine) -> Seconds:
    """Return the seconds of an optimizer step."""
    found = _passes(job, machine, trained=True)
    if job.frozen:
        return found
    elements = shard_parameters(job.shape, job.allocation, job.head)
    moved = elements * job.optimizer_bytes
    rate = machine.efficiency.host_link if job.offloaded else machine.streamed
    found["optimizer"] = moved / rate
    sizes = job.allocation.sizes
    copies = sizes["dp"] * sizes["cp"]
    if not job.sharded and copies > 1:  # Each step reduces gradients and gathers weights once.
        stage = parameters(job.shape, job.allocation, job.head).dense
        sent = stage * 3 * job.width * (copies - 1) / copies / machine.ring(copies, sizes["tp"])
        found["weights"] += sent * (1 - machine.efficiency.overlap)
    return found


def _passes(job: PassJob, machine: Machine, *, trained: bool) -> dict[str, float]:
    pp = job.allocation.sizes["pp"]
    tokens = min(job.tokens, max(job.microbatch, job.length))
    once = _head(job, machine, tokens, trained=trained)
    sparse = job.shape.expert_layers
    for layers, moe in ((job.shape.layers - sparse, False), (sparse, True)):
        if layers:
            for cause, seconds in _layer(job, machine, tokens, moe=moe, trained=trained).items():
                once[cause] = once.get(cause, 0.0) + layers / pp * seconds
    microbatches = max(job.tokens / tokens, 1.0)
    found = {cause: seconds * microbatches for cause, seconds in once.items()}
    found["bubble"] = sum(once.values()) * (pp - 1) / job.virtual
    if job.small:
        found["weights"] += _whole(job, machine, trained=trained)
    return found


def _whole(job: PassJob, machine: Machine, *, trained: bool) -> float:
    """Return the seconds to gather all weights at once and reduce gradients, without overlap."""
    units = 2 if trained and not job.frozen else 1
    sent = 1 + (FLOAT32 / job.width if units > 1 else 0.0)
    weights = parameters(job.shape, job.allocation, job.head)
    host = machine.efficiency.gathers * (job.shape.layers + 1) * units
    return _gathered(job, machine, weights) * sent + (host if _copies(job) > 1 else 0.0)


def _head(job: PassJob, machine: Machine, tokens: float, *, trained: bool) -> dict[str, float]:
    """Return the seconds of the output layer and its float32 log-probabilities."""
    shape, sizes, rates = job.shape, job.allocation.sizes, machine.efficiency
    outputs = shape.vocabulary_of_rank(sizes["tp"]) if job.head == "lm" else 1 / sizes["tp"]
    own = tokens / sizes["cp"]
    flops = 2 * own * shape.hidden * outputs * (3 if trained else 1)
    moved = 10 * own * outputs * (2 if trained else 1)
    share = rates.of_product(own, shape.hidden)
    products = flops / machine.flops(share, job.width)
    return {"products": products, "elementwise": moved / machine.streamed}


def _layer(
    job: PassJob, machine: Machine, tokens: float, *, moe: bool, trained: bool
) -> dict[str, float]:
    """Return the seconds of all passes of a micro-batch through one layer.

    A backward pass has the products of two forward passes (of one pass for frozen weights) and 2.5
    times the attention (Dao 2023).
    """
    own, rates = tokens / job.allocation.sizes["cp"], machine.efficiency
    forward = 1 + (job.repeated if trained else 0.0)
    products = _products(job, machine, own, moe=moe) * (
        forward + ((1 if job.frozen else 2) if trained else 0)
    )
    attention = _attention(job, machine, own) * (forward + (2.5 if trained else 0))
    elementwise = _elementwise(job, machine, own, moe=moe) * (forward + (1.5 if trained else 0))
    busy = products + attention + elementwise
    launched = rates.launches * (forward + (2 if trained else 0))
    weights = layer_parameters(job.shape, job.allocation, moe=moe)
    moved = 0.0
    if job.sharded and not job.small and _copies(job) > 1:
        moved = _gathered(job, machine, weights) * _gathers(job, trained=trained)
        launched += rates.gathers * (1 if not trained else 2 if job.frozen else 3)
    hidden = busy if machine.gpu.asynchronous else 0.0
    found = {
        "products": products,
        "attention": attention,
        "elementwise": elementwise + max(launched - hidden, 0.0),
        "communication": _exchanged(job, machine, own, moe=moe) * (forward + int(trained))
        + _passed_on(job, machine, own, attention, forward=forward, trained=trained),
        "weights": moved - min(moved * rates.overlap, busy),
    }
    if job.offloaded:
        copies = job.allocation.sizes["dp"] * job.allocation.sizes["cp"]
        shard = weights.total / copies * job.width
        found["host"] = shard * _gathers(job, trained=trained) / rates.host_link
    return found


def _gathers(job: PassJob, *, trained: bool) -> float:
    """Return how often a layer's weights are gathered or reduced, in units of one gather."""
    if not trained:
        return 1
    return 2 if job.frozen else 2 + FLOAT32 / job.width


def _copies(job: PassJob) -> int:
    """Return the number of ranks over which weights are sharded."""
    return job.allocation.sizes["dp"] * job.allocation.sizes["cp"]


def forward_flops_per_token(shape: ModelShape, head: Head, tp: int = 1) -> float:
    """Return the operations of matrix products with the parameters that are active for a token.

    The embedding lookup costs nothing. With ``tp`` tensor ranks, the result is the mean per rank.
    """
    attention = shape.attention_elements(tp)
    dense = shape.mlp_matrices * shape.hidden * shape.inner
    routed = shape.experts_per_token * shape.expert_inner + shape.shared_inner
    sparse = shape.mlp_matrices * shape.hidden * routed + shape.hidden * shape.experts
    plain = shape.layers - shape.expert_layers
    outputs = shape.vocabulary_of_rank(tp) if head == "lm" else 1 / tp
    layers = shape.layers * attention + (plain * dense + shape.expert_layers * sparse) / tp
    return 2 * (layers + shape.hidden * outputs)


def _products(job: PassJob, machine: Machine, own: float, *, moe: bool) -> float:
    """Return the seconds of the matrix products of a forward pass over ``own`` tokens.

    The time to read the weights is a lower bound.
    """
    shape, sizes, rates = job.shape, job.allocation.sizes, machine.efficiency
    tp, etp = sizes["tp"], expert_tp(job.allocation)
    ranks = shape.attention_ranks(tp)
    attention = 2 * own * shape.attention_elements(tp)
    seconds = attention / machine.flops(rates.of_product(own, shape.queries / ranks), job.width)
    inner = (shape.shared_inner if moe else shape.inner) / tp
    if inner:
        flops = 2 * own * shape.mlp_matrices * shape.hidden * inner
        seconds += flops / machine.flops(rates.of_product(own, inner), job.width)
    if moe:
        each, chosen = shape.expert_inner / etp, shape.experts_per_token
        tokens = own * chosen / (tp // etp)
        rows = tokens * sizes["ep"] / shape.experts
        share = rates.of_product(rows, each) * rates.grouped / rates.products
        flops = 2 * tokens * shape.mlp_matrices * shape.hidden * each
        seconds += flops / machine.flops(share, job.width)
    weights = layer_parameters(shape, job.allocation, moe=moe).total
    return max(seconds / job.rate, weights * job.width / machine.streamed)


def _attention(job: PassJob, machine: Machine, own: float) -> float:
    """Return the seconds of attention. On average, a token attends to half of its sequence."""
    shape, tp = job.shape, job.allocation.sizes["tp"]
    flops = 4 * own * shape.queries / shape.attention_ranks(tp) * job.length / 2
    return flops / machine.flops(machine.efficiency.attention, job.width)


def _elementwise(job: PassJob, machine: Machine, own: float, *, moe: bool) -> float:
    """Return the seconds of norms, rotations, activations and residual sums of a forward pass."""
    shape, tp = job.shape, job.allocation.sizes["tp"]
    inner = (shape.shared_inner if moe else shape.inner) / tp
    repeated = 0.0 if job.sequence_parallel else _repeated(shape)
    share = repeated + (1 - repeated) / shape.attention_ranks(tp)
    elements = machine.efficiency.traffic * shape.hidden * share
    if moe:
        chosen = shape.experts_per_token / (tp // expert_tp(job.allocation))
        inner += chosen * shape.expert_inner / expert_tp(job.allocation)
        elements += 6 * chosen * shape.hidden
    return own * (elements + 4 * inner) * job.width / machine.streamed


def _repeated(shape: ModelShape) -> float:
    """Return the share of a layer's elementwise work that every tensor rank repeats.

    Every rank computes two norms (4 hidden values each) and two residual sums (3 each). Ranks split
    the work on heads: rotations (6 values for each query and key) and copies of queries, keys,
    values and results.
    """
    whole = (2 * 4 + 2 * 3) * shape.hidden
    of_heads = 6 * (shape.queries + shape.keys) + 2 * (2 * shape.queries + 2 * shape.keys)
    return whole / (whole + of_heads)


def _exchanged(job: PassJob, machine: Machine, own: float, *, moe: bool) -> float:
    """Return the seconds of communication in a forward pass, for t, c and e."""
    shape, sizes = job.shape, job.allocation.sizes
    tp, cp, ep, etp = sizes["tp"], sizes["cp"], sizes["ep"], expert_tp(job.allocation)
    seconds = 0.0
    # On GPUs, the measured share of the bandwidth includes the latency.
    waits = not machine.gpu.asynchronous
    if tp > 1:  # In two all-reduces, each rank sends and receives every element.
        sent = 4 * own * shape.hidden * job.width * (tp - 1) / tp
        seconds += sent / machine.ring(tp, 1) + 2 * waits * machine.latency(tp, 1)
    if cp > 1 and not passes_keys(shape, job.allocation):  # Ranks exchange q, k, v and the result.
        sent = 2 * own * (shape.queries + shape.keys) / tp * job.width * (cp - 1) / cp
        seconds += sent / machine.exchange(cp, tp) + 4 * waits * machine.latency(cp, tp)
    if moe and ep > 1:
        tokens = own * shape.experts_per_token / (tp // etp)
        sent = 2 * tokens * shape.hidden * job.width * (ep - 1) / ep
        seconds += sent / machine.exchange(ep, etp)
    return seconds


def _passed_on(
    job: PassJob, machine: Machine, own: float, attention: float, *, forward: float, trained: bool
) -> float:
    """Return the seconds of ring attention's transfers that do not overlap with its computation.

    Rank r of c needs 2 c - 2 - r chunks of the other ranks. A chunk has half of a rank's tokens.
    For short sequences, the rank needs about half a sequence before each of its two chunks. A
    backward pass sends keys and values again and returns their gradients in float32.
    """
    shape, sizes = job.shape, job.allocation.sizes
    tp, cp = sizes["tp"], sizes["cp"]
    if not passes_keys(shape, job.allocation):
        return 0.0
    tokens = min(0.75 * (cp - 1) * own, job.length)
    keys = 2 * tokens * shape.kv_heads_of_rank(tp) * shape.head_dim
    moved = keys * (job.width * (forward + int(trained)) + (FLOAT32 if trained else 0))
    seconds = moved / machine.exchange(cp, tp)
    return seconds - min(seconds * machine.efficiency.overlap, attention)


def _gathered(job: PassJob, machine: Machine, weights: Parameters) -> float:
    """Return the seconds to gather the shards of weights once."""
    copies = _copies(job)
    if not job.sharded or copies == 1:
        return 0.0
    sent = weights.total * job.width * (copies - 1) / copies
    return sent / machine.ring(copies, job.allocation.sizes["tp"])


POINTS: Final = 64
"""Number of lengths at which the number of unfinished sequences is evaluated."""
BISECTIONS: Final = 60
STEEPEST: Final = 500.0
"""Maximum rate of a distribution on [0, 1]. The mean is then 1/500."""


@dataclass(frozen=True)
class LengthDistribution:
    """The lengths of completions from 0 to ``most`` tokens, with a ``mean``.

    The truncated exponential distribution has the largest entropy of all distributions with these
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
        """Return the length that a share of completions exceeds (the inverse of `longer`)."""
        rate = self._rate
        if abs(rate) < 1e-6:
            return (1 - share) * self.most
        return -math.log1p((1 - share) * math.expm1(-rate)) / rate * self.most

    @cached_property
    def _rate(self) -> float:
        """Rate of the distribution scaled to [0, 1]; negative if the mean is above the middle."""
        least = 1 / STEEPEST
        wanted = min(max(self.mean / self.most, least), 1 - least)
        low, high = -STEEPEST, STEEPEST
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean(middle) > wanted else (low, middle)
        return low


def _mean(rate: float) -> float:
    """Return the mean of the truncated exponential distribution on [0, 1]."""
    return 0.5 if abs(rate) < 1e-6 else 1 / rate - 1 / math.expm1(rate)


class EngineCosts(NamedTuple):
    """The seconds for which the GPU waits for the host in a decoding step of a server."""

    batch: float
    """Seconds per step."""
    row: float = 1e-5
    """Seconds per sequence."""


ENGINES: Final[Mapping[str, EngineCosts]] = {"sglang": EngineCosts(1e-3), "vllm": EngineCosts(1e-3)}


class Narrower(NamedTuple):
    """The factors by which narrower types of weights and caches change bytes and rates."""

    weights: float = 1.0
    """Factor of the bytes of weights."""
    cache: float = 1.0
    """Factor of the bytes of keys and values."""
    rate: float = 1.0
    """Factor of the operations per second of matrix products."""


SAME: Final = Narrower()
"""Factors for weights and caches in the type of training."""


@dataclass(frozen=True, kw_only=True)
class DecodeJob:
    """The sequences that one copy of a model generates; ``group`` of them share a prompt."""

    shape: ModelShape
    allocation: Allocation
    sequences: float
    prompt: float
    """Mean length of a prompt in tokens."""
    group: int
    lengths: LengthDistribution
    cache_tokens: float
    """Number of tokens that fit into the cache."""
    width: int = HALF
    """Bytes of an element."""
    narrower: Narrower = SAME


def generation(job: DecodeJob, machine: Machine) -> Seconds:
    """Return the seconds until the last sequence has ended."""
    mean = job.lengths.mean
    rows = min(job.sequences, max(job.cache_tokens / (job.prompt + mean), 1.0))
    waiting = max(job.sequences - rows, 0.0)
    full = waiting / rows * mean * token_seconds(job, machine, rows, job.prompt + mean / 2)
    tp = job.allocation.sizes["tp"]
    flops = job.sequences / job.group * job.prompt * forward_flops_per_token(job.shape, "lm", tp)
    share = machine.efficiency.of_product(job.shape.queries / tp)
    parts = min(job.allocation.sizes["pp"], max(job.sequences / job.group, 1.0))
    prefill = flops / parts / machine.flops(share * job.narrower.rate, job.width)
    return {"prefill": prefill, "decode": full + _until_the_last(job, machine, rows)}


def _until_the_last(job: DecodeJob, machine: Machine, rows: float) -> float:
    """Return the seconds until the last of ``rows`` sequences that begin together has ended."""
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
    """Return the seconds to decode one token of ``rows`` sequences with ``context`` tokens each."""
    shape, tp, pp = job.shape, job.allocation.sizes["tp"], job.allocation.sizes["pp"]
    streamed = machine.gpu.bytes_per_s * machine.efficiency.decoding
    own = rows / min(pp, max(rows, 1.0))  # Each stage decodes a different part of the sequences.
    weights = _read_elements(job, own) * job.width * job.narrower.weights / streamed
    share = machine.efficiency.products * job.narrower.rate
    products = own * forward_flops_per_token(shape, "lm", tp) / machine.flops(share, job.width)
    keys = shape.layers * shape.cache_elements(job.allocation)
    cached = keys * job.width * job.narrower.cache
    rates = machine.efficiency
    costs = ENGINES.get(job.allocation.backend, EngineCosts(rates.token, rates.row))
    seconds = max(weights, products) + own * context * cached / streamed
    seconds += pp * (costs.batch + costs.row * own)
    if tp > 1:
        sent = 2 * own * shape.hidden * job.width * (tp - 1) / tp / machine.ring(tp, 1)
        seconds += 2 * shape.layers * (machine.latency(tp, 1) + sent)
    if pp > 1:
        seconds += pp * machine.latency(pp, tp)
    return seconds


def _read_elements(job: DecodeJob, rows: float) -> float:
    """Return the elements of weights that decoding a token of ``rows`` sequences reads.

    The result sums one rank of each stage. Decoding reads only the chosen experts and some rows of
    the embedding.
    """
    shape, tp = job.shape, job.allocation.sizes["tp"]
    whole = replace(job.allocation, sizes={**job.allocation.sizes, "pp": 1})
    own = parameters(shape, whole, "lm")
    dense = own.dense - (0 if shape.tied else shape.vocabulary_of_rank(tp) * shape.hidden)
    if not shape.experts:
        return dense
    chosen = 1 - math.pow(1 - shape.experts_per_token / shape.experts, rows)
    of_layer = layer_parameters(shape, whole, moe=True).experts
    split = tp // expert_tp(job.allocation)  # Servers split each expert over the tensor ranks.
    return dense + shape.expert_layers * of_layer * chosen / split
