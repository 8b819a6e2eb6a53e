"""Estimates of the bytes that a model needs on its fullest GPU.

`tensors` lists the tensors of a model that a rank keeps, and their places. Estimates of GPUs, hosts
and checkpoints are sums over such lists. docs/engine-internals.md has the sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from slurmrl.config.allocation import Allocation
from slurmrl.config.schema import Model
from slurmrl.plan.dataflow import Head
from slurmrl.plan.engine_rules import BUILT_IN, FSDP
from slurmrl.plan.estimates.added_sizes import beside_cache, replayed, trained_shard
from slurmrl.plan.estimates.shape import (
    Lengths,
    ModelShape,
    expert_tp,
    layer_parameters,
    parameters,
    passes_keys,
    shard_parameters,
    uses_sequence_parallel,
)

BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2}
SHARDED: Final = FSDP
"""Engines that shard weights, gradients and optimizer state over data- and context-parallel ranks
(ZeRO stage 3)."""
FLOAT32: Final = 4
UNSHARDED_LAYERS: Final = 2
"""Number of layers that are gathered at a time: the current and the prefetched layer."""
LOGITS: Final = 2**22
"""Number of elements in a chunk of logits."""
LOGIT_TOKENS: Final = 1024
"""Minimum number of tokens in a chunk of logits."""
FINAL_HIDDEN: Final = 3
"""Number of hidden states per token that the forward pass keeps after the last layer."""
REDUCED: Final = 4
"""Bytes per element of a gradient during its reduction (float32)."""
PAGE_TOKENS: Final = 16
"""Number of tokens in a page of the native engine's key-value cache."""
DRAWING_BYTES: Final = 20
"""Bytes to sample a token, per vocabulary entry: a float32 logit and two float64 probabilities."""
PACKED_BYTES: Final = 2**30
"""Maximum bytes of a model whose matrices generation on CPUs copies (`models.inference`)."""
GPU: Final = "gpu"
LOCKED: Final = "locked"
"""Page-locked host memory. torch may round up its allocations."""
HOST: Final = "host"
WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
COPIES: Final = "copies"
"""Kind of copies of tensors from which checkpoints are written."""
STANDING: Final = (WEIGHTS, GRADIENTS, OPTIMIZER)
PASSING: Final = ("activations", "kv_cache")
EXPERTS: Final = "experts"
"""Name of the records of experts that exist during a call."""


class Tensors(NamedTuple):
    """Tensors of a model that a rank keeps, of one kind and in one place."""

    kind: str
    """Kind of the tensors: one of `STANDING`, or `COPIES`."""
    where: str
    """Place of the tensors (`GPU`, `LOCKED` or `HOST`)."""
    elements: float
    width: int
    """Total bytes per element in all tensors of this kind."""


def total_bytes(tensors: Iterable[Tensors], *, kind: str = "", where: str = "") -> int:
    """Return the bytes of the tensors of a kind in a place; an empty string selects all."""
    chosen = (one for one in tensors if kind in ("", one.kind) and where in ("", one.where))
    return round(sum(one.elements * one.width for one in chosen))


@dataclass(frozen=True)
class Memory:
    """The bytes that a model needs on one GPU.

    `STANDING` parts exist all the time, and `PASSING` parts one at a time. Sharded engines free
    gradients after each optimizer step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes of activations and gathered weights for the largest micro-batch, in training or in a
    forward pass of a role that is not trained."""
    kv_cache: int
    """Bytes for generation: keys and values of all sequences of a rank at full length, gathered
    weights, and memory to prefill a micro-batch of prompts or to sample tokens."""

    experts: int = 0
    """Bytes of recorded experts during a call that replays them."""
    sequence: int = 0
    """Bytes of keys and values for one sequence of the maximum length."""
    frees_gradients: bool = False
    locked: int = 0
    """Bytes of page-locked host memory."""
    host: int = 0
    """Bytes of host memory that is not page-locked."""

    @property
    def standing(self) -> int:
        return self.weights + self.optimizer + (0 if self.frees_gradients else self.gradients)

    @property
    def computing(self) -> int:
        """Bytes for the largest micro-batch, with gradients that exist only during the call."""
        return self.activations + self.experts + (self.gradients if self.frees_gradients else 0)

    @property
    def together(self) -> int:
        return self.standing + max(self.computing, self.kv_cache)

    def explain(self) -> dict[str, int]:
        names = (*STANDING, *PASSING, EXPERTS, "together")
        parts = {part: getattr(self, part) for part in names}
        return {f"{part}_bytes": size for part, size in parts.items()}


@dataclass(frozen=True)
class MemoryDemand:
    """The facts that determine a model's memory: the model, its layout and its use."""

    model: Model
    shape: ModelShape
    allocation: Allocation
    head: Head
    trained: bool
    computes: bool
    """Whether the model has calls other than generation."""
    generates: bool
    lengths: Lengths | None
    minibatches: int = 1
    """Number of optimizer steps in a step."""
    replays_experts: bool = False
    """Whether generation records experts, which the model's other calls replay."""
    cache_bytes: int | None = None
    """Maximum bytes of the key-value cache. Further sequences wait."""
    copies: bool = False
    """Whether the rank keeps copies for checkpoints that are written during training."""
    on_cpus: bool = False
    """Whether the model runs on CPUs."""


def adapts(job: MemoryDemand) -> bool:
    """Return whether the model trains adapters of frozen weights."""
    return job.trained and job.model.lora is not None


def estimate(job: MemoryDemand) -> Memory:
    """Return the estimated memory of a model."""
    kept = list(tensors(job))
    gradients = total_bytes(kept, kind=GRADIENTS, where=GPU)
    return Memory(
        weights=total_bytes(kept, kind=WEIGHTS, where=GPU),
        gradients=gradients,
        optimizer=total_bytes(kept, kind=OPTIMIZER, where=GPU),
        activations=_activations(job, gradients) if job.computes else 0,
        kv_cache=_generation(job) if job.generates else 0,
        experts=_experts(job) if job.computes and job.replays_experts else 0,
        sequence=_cache(job, 1) if job.generates else 0,
        frees_gradients=job.allocation.backend in SHARDED,
        locked=total_bytes(kept, where=LOCKED),
        host=total_bytes(kept, where=HOST),
    )


def tensors(job: MemoryDemand) -> Iterator[Tensors]:
    """Yield the tensors that a rank keeps of a model.

    Sharded engines keep float32 shards of trained weights, of gradients and of moments;
    ``cpu_offload`` moves these shards to the host. Megatron's distributed optimizer keeps float32
    gradients on every replica, and shards of moments and of float32 copies of bfloat16 weights.
    """
    width, moments = BYTES[job.model.dtype], len(job.model.optimizer.moments)
    trained = trained_shard(job.model, job.shape, job.allocation, job.head)
    if job.allocation.backend in SHARDED:
        shard = shard_parameters(job.shape, job.allocation, job.head)
        locked, host = (LOCKED, HOST) if job.model.cpu_offload else (GPU, GPU)
        changes = (job.trained and not adapts(job)) or job.model.ema is not None
        yield Tensors(WEIGHTS, locked, shard, FLOAT32 if changes else width)
        if adapts(job):
            yield Tensors(WEIGHTS, locked, trained, FLOAT32)
        if job.trained:
            yield Tensors(GRADIENTS, locked, trained, FLOAT32)
            yield Tensors(OPTIMIZER, host, trained, FLOAT32 * moments)
    else:
        own = parameters(job.shape, job.allocation, job.head).total
        yield Tensors(WEIGHTS, GPU, own, width)
        if job.trained:
            master = FLOAT32 if job.model.dtype == "bfloat16" else 0
            yield Tensors(GRADIENTS, GPU, own, FLOAT32)
            yield Tensors(OPTIMIZER, GPU, trained, FLOAT32 * moments + master)
    if job.copies:
        yield from saved(job.model, job.shape, job.allocation, job.head, trained=job.trained)


def saved(
    model: Model, shape: ModelShape, allocation: Allocation, head: Head, *, trained: bool
) -> Iterator[Tensors]:
    """Yield the tensors of one rank's shard that checkpoints contain.

    These are float32 tensors: trained weights with their moments, or the weights of an average.
    """
    if trained:
        width = FLOAT32 * (1 + len(model.optimizer.moments))
        yield Tensors(COPIES, HOST, trained_shard(model, shape, allocation, head), width)
    elif model.ema is not None:
        yield Tensors(COPIES, HOST, shard_parameters(shape, allocation, head), FLOAT32)


def _layer_total(job: MemoryDemand) -> float:
    """Return the number of elements of the largest layer on one rank."""
    moe = job.shape.expert_layers > 0
    return layer_parameters(job.shape, job.allocation, moe=moe).total


def _gathered_layers(job: MemoryDemand) -> float:
    """Return the bytes of gathered weights (layers and image encoder) while one layer computes."""
    if job.allocation.backend not in SHARDED:
        return 0
    return (UNSHARDED_LAYERS * _layer_total(job) + job.shape.tower) * BYTES[job.model.dtype]


def tokens_of_microbatch(job: MemoryDemand) -> int:
    """Return the tokens of a micro-batch on one rank; context ranks share each sequence."""
    most = job.model.max_tokens_per_microbatch
    if job.lengths is not None:
        most = max(min(most, _tokens_of_rank(job, job.lengths)), job.lengths.longest)
    return -(-most // job.allocation.sizes["cp"])


def _tokens_of_rank(job: MemoryDemand, lengths: Lengths, *, whole: bool = False) -> int:
    """Return the tokens of one optimizer step on one data-parallel rank.

    Without training, or with ``whole``, return the tokens of a whole step.
    """
    parts = 1 if whole else job.minibatches
    return -(-lengths.sequences // (job.allocation.sizes["dp"] * parts)) * lengths.longest


def layer_activations(job: MemoryDemand, *, selective: bool = False) -> float:
    """Return the elements per token that one layer keeps for its backward pass.

    With ``selective`` checkpointing, a layer keeps only the inputs of its two blocks, queries,
    keys, values and the result of attention.
    """
    shape, tp = job.shape, job.allocation.sizes["tp"]
    split = tp if uses_sequence_parallel(job.model, job.allocation) else 1
    queries = shape.queries / shape.attention_ranks(tp)
    attention = 2 * queries + 2 * shape.kv_heads_of_rank(tp) * shape.head_dim
    if selective:
        return 2 * shape.hidden / split + attention
    return 4 * shape.hidden / split + attention + _inner_tensors(job) * _inner(job)


def _inner(job: MemoryDemand) -> float:
    """Return the inner units of a feed-forward block that are active for a token on one rank."""
    shape = job.shape
    inner = shape.inner / job.allocation.sizes["tp"]
    if shape.expert_layers:
        # transformers allocates a row for each of a token's experts, even on another rank.
        shared = 1 if job.model.implementation == "hf" else expert_tp(job.allocation)
        routed = shape.experts_per_token * shape.expert_inner / shared
        inner = routed + shape.shared_inner / job.allocation.sizes["tp"]
    return inner


def _inner_tensors(job: MemoryDemand) -> int:
    """Return the number of tensors with `_inner` units that a feed-forward block keeps.

    The built-in dense block keeps its gate and its up-projection. Experts, blocks of Megatron and
    blocks with an adapter of their output also keep the product of these two tensors. Blocks of
    transformers also keep the activated gate.
    """
    gated = job.shape.mlp_matrices == 3
    if job.model.implementation == "hf":
        return 4 if gated else 2
    if adapts(job) and job.model.lora is not None and job.model.lora.adapts("down_proj"):
        return 3 if gated else 2
    if job.allocation.backend not in SHARDED or job.shape.expert_layers:
        return 3 if gated else 2
    return 2


def _activations(job: MemoryDemand, gradients: int) -> int:
    """Return the bytes in addition to weights, optimizer state and ``gradients``.

    With one micro-batch per optimizer step, gradients grow only while activations shrink, so the
    two maxima do not add up.
    """
    tokens, width = tokens_of_microbatch(job), BYTES[job.model.dtype]
    if not job.trained:
        head = _projection(job) * width if job.allocation.backend in SHARDED else 0
        layer = layer_activations(job) * tokens * width
        return round(layer + _logits(job, tokens) + head + _gathered_layers(job))
    backward = max(_head_backward(job, tokens), _layer_backward(job, tokens))
    peak, last = _kept(job, tokens) + backward, _embedding_backward(job)
    if _accumulates(job) or job.allocation.backend not in SHARDED:
        return round(max(peak, last))
    return round(max(peak - gradients, last))


def _experts(job: MemoryDemand) -> int:
    batch = 0
    if job.lengths is not None:  # An optimizer step holds a copy of its minibatch's experts.
        batch = _tokens_of_rank(job, job.lengths, whole=True)
        batch += _tokens_of_rank(job, job.lengths) if job.trained else 0
    return replayed(
        job.shape,
        job.allocation,
        batch=batch,
        micro=tokens_of_microbatch(job),
        layers=_layers_in_flight(job),
    )


def _kept(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes that the forward pass keeps for all layers, the final norm and the head."""
    layers, hidden = _layers_in_flight(job), job.shape.hidden
    each: float = hidden
    if job.model.recompute != "full":
        each = layer_activations(job, selective=job.model.recompute == "selective")
    return (layers * each + FINAL_HIDDEN * hidden) * tokens * BYTES[job.model.dtype]


def _head_backward(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes at the start of the backward pass: logits and a sharded engine's head.

    The head's bytes are the gathered projection and its float32 gradient. The gradient is converted
    after the logits are freed.
    """
    if job.allocation.backend not in SHARDED:
        return _logits(job, tokens)
    width, matrix = BYTES[job.model.dtype], _projection(job)
    if adapts(job):
        return matrix * width + _logits(job, tokens)
    return matrix * (width + REDUCED) + max(_logits(job, tokens), matrix * width)


def _layer_backward(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes of the backward pass of one layer.

    The pass needs recomputed tensors and gradients of the layer's activations. A sharded engine
    also needs gathered weights and the gradient during its reduction.
    """
    width = BYTES[job.model.dtype]
    elements = 4 * _inner(job) + 2 * job.shape.hidden
    if job.model.recompute != "off":
        elements += layer_activations(job)
    if job.model.recompute == "selective":
        elements -= layer_activations(job, selective=True)
    size = max(elements * tokens * width, _ring_backward(job, tokens))
    if job.allocation.backend in SHARDED:
        size += _gathered_layers(job) + _tied_projection(job) * width
        if not adapts(job):
            size += _layer_total(job) * (width + REDUCED) + _tied_projection(job) * width
    return size


def _ring_backward(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes of ring attention's backward pass in addition to its inputs and result.

    A rank holds keys and values of three ranks (its own, the current and the next), four gradients
    of keys and values (its own, two in flight, one that returns), and gradients of queries.
    """
    if not passes_keys(job.shape, job.allocation):
        return 0
    tp = job.allocation.sizes["tp"]
    keys = 2 * job.shape.kv_heads_of_rank(tp) * job.shape.head_dim
    queries = job.shape.queries / tp
    size = 3 * keys * BYTES[job.model.dtype] + 4 * keys * FLOAT32 + queries * FLOAT32
    return size * tokens


def _tied_projection(job: MemoryDemand) -> float:
    """Return the elements of the head's matrix if it is also the embedding, else 0.

    This matrix and its gradient stay gathered until the end of the backward pass.
    """
    return _projection(job) if job.shape.tied and job.head == "lm" else 0


def _embedding_backward(job: MemoryDemand) -> float:
    """Return the bytes of the embedding's gradient at the end of the backward pass."""
    if job.allocation.backend not in SHARDED or adapts(job):
        return 0
    embedding = job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) * job.shape.hidden
    width = BYTES[job.model.dtype]
    return embedding * (width + REDUCED) + _tied_projection(job) * width


def _logits(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes of a chunk's logits in float32, and of their gradient."""
    vocabulary = _vocabulary(job)
    chunk = min(tokens * vocabulary, max(LOGITS, LOGIT_TOKENS * vocabulary))
    return chunk * (4 + BYTES[job.model.dtype])


def _vocabulary(job: MemoryDemand) -> float:
    """Return the number of outputs of the head on one rank."""
    return job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) if job.head == "lm" else 1


def _projection(job: MemoryDemand) -> float:
    """Return the number of elements of the head's matrix on one rank."""
    return _vocabulary(job) * job.shape.hidden


def _accumulates(job: MemoryDemand) -> bool:
    """Return whether an optimizer step may have several micro-batches."""
    return job.lengths is None or _tokens_of_rank(job, job.lengths) > (
        job.model.max_tokens_per_microbatch
    )


def _layers_in_flight(job: MemoryDemand) -> float:
    """Return (number of layers) x (number of micro-batches) whose activations stage 1 keeps.

    The stage keeps p micro-batches of L / p layers with the 1F1B schedule, and more with the
    interleaved schedule (Korthikanti et al. 2022).
    """
    pp, sizes = job.allocation.sizes["pp"], job.model.model
    virtual = (sizes.virtual_pipeline_model_parallel_size if sizes else None) or 1
    return job.shape.layers * (1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1)


def kv_bytes_per_token(shape: ModelShape, allocation: Allocation, dtype: str) -> float:
    """Return the bytes per token of a rank's cache: keys and values of its heads and layers."""
    elements = shape.cache_elements(allocation)
    return elements * shape.layers / allocation.sizes["pp"] * BYTES[dtype]


def _generation(job: MemoryDemand) -> int:
    if job.lengths is None:
        return 0
    sequences = -(-job.lengths.sequences // job.allocation.sizes["dp"])
    size: float = _cache(job, sequences)
    if job.cache_bytes is not None:
        size = min(size, job.cache_bytes)
    if job.allocation.backend in SHARDED:
        size += whole_weights(job.shape, job.allocation, job.model.dtype)
    if job.allocation.backend in BUILT_IN:
        size += max(_prefill(job, job.lengths), _drawing(job, sequences)) + packed_bytes(job)
    return round(size)


def packed_bytes(job: MemoryDemand) -> float:
    """Return the bytes of copied matrices with which the built-in engine generates on CPUs."""
    own, model = parameters(job.shape, job.allocation, "lm"), job.model
    copied = job.on_cpus and (model.dtype, model.implementation) == ("float32", "builtin")
    if not copied or own.total * FLOAT32 > PACKED_BYTES:
        return 0
    head = job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) * job.shape.hidden
    layers = own.dense - (head if job.shape.tied else 2 * head)
    sparse = job.shape.expert_layers or uses_sequence_parallel(model, job.allocation)
    if adapts(job) or (sparse and job.allocation.sizes["tp"] > 1):
        layers = 0  # short_forward copies only dense layers.
    return (layers + head) * FLOAT32


def _cache(job: MemoryDemand, sequences: int) -> int:
    """Return the bytes of keys, values and recorded experts in the cache for full sequences."""
    tokens = sequences * job.lengths.longest if job.lengths is not None else 0
    each = kv_bytes_per_token(job.shape, job.allocation, job.model.dtype)
    if job.replays_experts and job.allocation.backend in BUILT_IN:
        each += beside_cache(job.shape)
    return round(tokens * each)


def whole_weights(shape: ModelShape, allocation: Allocation, dtype: str) -> float:
    """Return the bytes of a language model's weights on one rank with all shards gathered."""
    return parameters(shape, allocation, "lm").total * BYTES[dtype]


def _prefill(job: MemoryDemand, lengths: Lengths) -> float:
    """Return the bytes of one layer's activations for the prompts in a prefill batch."""
    prompt = lengths.longest - lengths.new_tokens
    prompts = -(-lengths.sequences // (lengths.group * job.allocation.sizes["dp"]))
    tokens = max(min(job.model.max_tokens_per_microbatch, prompts * prompt), prompt)
    return layer_activations(job) * tokens * BYTES[job.model.dtype]


def _drawing(job: MemoryDemand, sequences: int) -> float:
    """Return the bytes to sample a token of each sequence."""
    return sequences * job.shape.vocabulary * (BYTES[job.model.dtype] + DRAWING_BYTES)
