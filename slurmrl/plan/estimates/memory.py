"""Estimates of the bytes that a model needs on its fullest GPU. Sources: docs/engine-internals.md.

`tensors` lists the tensors that a rank keeps of a model, and their places. Estimates of GPUs, hosts
and checkpoints are sums over such lists.
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
"""Layers that are gathered at a time: the current and the prefetched one."""
LOGITS: Final = 2**22
LOGIT_TOKENS: Final = 1024
"""Logits are computed ``LOGITS`` elements at a time, but for at least ``LOGIT_TOKENS`` tokens."""
FINAL_HIDDEN: Final = 3
"""Hidden states that are kept at the end of the forward pass."""
REDUCED: Final = 4
"""Bytes per element of a gradient that is being reduced: float32."""
PAGE_TOKENS: Final = 16
"""Tokens of a page of the native engine's key-value cache."""
DRAWING_BYTES: Final = 20
"""To sample a token, each of its logits is held in float32 and its probability twice in 64 bits."""
PACKED_BYTES: Final = 2**30
"""Largest model of which generation on CPUs copies the matrices (`models.inference`)."""
GPU: Final = "gpu"
LOCKED: Final = "locked"
"""Page-locked host memory, which torch may round up."""
HOST: Final = "host"
WEIGHTS: Final = "weights"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
COPIES: Final = "copies"
"""Copies that checkpoints save of a model."""
STANDING: Final = (WEIGHTS, GRADIENTS, OPTIMIZER)
PASSING: Final = ("activations", "kv_cache")
EXPERTS: Final = "experts"
"""Data that passes with activations if recorded experts are replayed."""


class Tensors(NamedTuple):
    """Tensors of one kind that a rank keeps of a model, in one place."""

    kind: str
    """One of `STANDING`, or ``copies``."""
    where: str
    elements: float
    width: int
    """Bytes of an element, or of all tensors of this kind that belong to it."""


def total_bytes(tensors: Iterable[Tensors], *, kind: str = "", where: str = "") -> int:
    """Return the bytes of the tensors of a kind in a place; an empty text selects all."""
    chosen = (one for one in tensors if kind in ("", one.kind) and where in ("", one.where))
    return round(sum(one.elements * one.width for one in chosen))


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU: of `STANDING` all the time, of `PASSING` one at a time.

    Sharded engines free gradients after each optimizer step.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Activations and gathered weights of the largest micro-batch: in training, or in a forward
    pass of a role that is not trained."""
    kv_cache: int
    """Keys and values of all sequences of a rank at full length, and the other needs of generation:
    the gathered weights, and memory to prefill a micro-batch of prompts or to sample tokens."""

    experts: int = 0
    """Recorded experts, while it computes."""
    sequence: int = 0
    """Keys and values of one sequence of the longest length."""
    frees_gradients: bool = False
    locked: int = 0
    """Bytes of page-locked host memory."""
    host: int = 0
    """Bytes of other host memory."""

    @property
    def standing(self) -> int:
        return self.weights + self.optimizer + (0 if self.frees_gradients else self.gradients)

    @property
    def computing(self) -> int:
        """Bytes of the largest micro-batch, with gradients that exist only then."""
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
    """A model, its layout and its use."""

    model: Model
    shape: ModelShape
    allocation: Allocation
    head: Head
    trained: bool
    computes: bool
    """Whether it executes calls other than generation."""
    generates: bool
    lengths: Lengths | None
    minibatches: int = 1
    """Optimizer steps of a step."""
    replays_experts: bool = False
    """Whether it records experts as it generates, and replays them as it computes."""
    cache_bytes: int | None = None
    """Limit of the key-value cache, beyond which sequences wait."""
    copies: bool = False
    """Whether it keeps copies for checkpoints, which are written while it computes."""
    on_cpus: bool = False
    """Whether it runs on CPUs."""


def adapts(job: MemoryDemand) -> bool:
    """Whether it trains adapters of frozen weights."""
    return job.trained and job.model.lora is not None


def estimate(job: MemoryDemand) -> Memory:
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

    Sharded engines keep float32 shards of weights that change, of gradients and of moments, which
    ``cpu_offload`` moves to the host. megatron with its distributed optimizer keeps float32
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
    """Yield the tensors that checkpoints have of one rank's shard.

    They are the trained weights with their moments, or the weights of an average, in float32.
    """
    if trained:
        width = FLOAT32 * (1 + len(model.optimizer.moments))
        yield Tensors(COPIES, HOST, trained_shard(model, shape, allocation, head), width)
    elif model.ema is not None:
        yield Tensors(COPIES, HOST, shard_parameters(shape, allocation, head), FLOAT32)


def _layer_total(job: MemoryDemand) -> float:
    """Elements of the largest layer on one rank."""
    moe = job.shape.expert_layers > 0
    return layer_parameters(job.shape, job.allocation, moe=moe).total


def _gathered_layers(job: MemoryDemand) -> float:
    """Bytes of the gathered weights, with an image encoder, while one layer computes."""
    if job.allocation.backend not in SHARDED:
        return 0
    return (UNSHARDED_LAYERS * _layer_total(job) + job.shape.tower) * BYTES[job.model.dtype]


def tokens_of_microbatch(job: MemoryDemand) -> int:
    """Tokens of a micro-batch on one rank; context-parallel ranks share each sequence."""
    most = job.model.max_tokens_per_microbatch
    if job.lengths is not None:
        most = max(min(most, _tokens_of_rank(job, job.lengths)), job.lengths.longest)
    return -(-most // job.allocation.sizes["cp"])


def _tokens_of_rank(job: MemoryDemand, lengths: Lengths, *, whole: bool = False) -> int:
    """Return the tokens of one optimizer step on one data-parallel rank.

    Without training, or if ``whole``, return the tokens of one step.
    """
    parts = 1 if whole else job.minibatches
    return -(-lengths.sequences // (job.allocation.sizes["dp"] * parts)) * lengths.longest


def layer_activations(job: MemoryDemand, *, selective: bool = False) -> float:
    """Return the elements per token that one layer keeps for its backward pass.

    These are all activations, or with ``selective`` checkpointing the inputs of its halves,
    queries, keys, values and the result of attention.
    """
    shape, tp = job.shape, job.allocation.sizes["tp"]
    split = tp if uses_sequence_parallel(job.model, job.allocation) else 1
    queries = shape.queries / shape.attention_ranks(tp)
    attention = 2 * queries + 2 * shape.kv_heads_of_rank(tp) * shape.head_dim
    if selective:
        return 2 * shape.hidden / split + attention
    return 4 * shape.hidden / split + attention + _inner_tensors(job) * _inner(job)


def _inner(job: MemoryDemand) -> float:
    """Inner units of a feed-forward block that are active for a token on one rank."""
    shape = job.shape
    inner = shape.inner / job.allocation.sizes["tp"]
    if shape.expert_layers:
        # transformers allocates a row for each of a token's experts, on this rank or on another.
        shared = 1 if job.model.implementation == "hf" else expert_tp(job.allocation)
        routed = shape.experts_per_token * shape.expert_inner / shared
        inner = routed + shape.shared_inner / job.allocation.sizes["tp"]
    return inner


def _inner_tensors(job: MemoryDemand) -> int:
    """Return the number of tensors of that size that a feed-forward block keeps.

    The built-in dense block keeps its gate and its other half. Experts, megatron's blocks and
    blocks with an adapter of their output also keep their product. transformers' blocks keep the
    activated gate as well.
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
    """Bytes in addition to weights, optimizer state and ``gradients``.

    With one micro-batch per optimizer step gradients grow only while activations are freed, so
    these bytes do not add up.
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
    if job.lengths is not None:  # an optimizer step holds a copy of its minibatch
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
    """Return the bytes that the forward pass keeps.

    They are activations of all layers, and the inputs and outputs of the final norm and of the
    head.
    """
    layers, hidden = _layers_in_flight(job), job.shape.hidden
    each: float = hidden
    if job.model.recompute != "full":
        each = layer_activations(job, selective=job.model.recompute == "selective")
    return (layers * each + FINAL_HIDDEN * hidden) * tokens * BYTES[job.model.dtype]


def _head_backward(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes at the start of the backward pass.

    They are logits, and for a sharded engine the gathered projection and its gradient in float32,
    which is converted once the logits are freed.
    """
    if job.allocation.backend not in SHARDED:
        return _logits(job, tokens)
    width, matrix = BYTES[job.model.dtype], _projection(job)
    if adapts(job):
        return matrix * width + _logits(job, tokens)
    return matrix * (width + REDUCED) + max(_logits(job, tokens), matrix * width)


def _layer_backward(job: MemoryDemand, tokens: int) -> float:
    """Return the bytes of the backward pass of one layer.

    They are recomputed tensors, gradients of the layer's activations, and for a sharded engine
    gathered weights and the gradient that is being reduced.
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

    They are keys and values of this rank, of the one whose keys it uses and of the next one, their
    gradients on this rank, two on their way and one that returns, and gradients of queries.
    """
    if not passes_keys(job.shape, job.allocation):
        return 0
    tp = job.allocation.sizes["tp"]
    keys = 2 * job.shape.kv_heads_of_rank(tp) * job.shape.head_dim
    queries = job.shape.queries / tp
    size = 3 * keys * BYTES[job.model.dtype] + 4 * keys * FLOAT32 + queries * FLOAT32
    return size * tokens


def _tied_projection(job: MemoryDemand) -> float:
    """Return the elements of a head's matrix that is also the embedding.

    The matrix and its gradient stay whole until the end of the backward pass.
    """
    return _projection(job) if job.shape.tied and job.head == "lm" else 0


def _embedding_backward(job: MemoryDemand) -> float:
    """Bytes at the end of the backward pass: the embedding's gradient that is being reduced."""
    if job.allocation.backend not in SHARDED or adapts(job):
        return 0
    embedding = job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) * job.shape.hidden
    width = BYTES[job.model.dtype]
    return embedding * (width + REDUCED) + _tied_projection(job) * width


def _logits(job: MemoryDemand, tokens: int) -> float:
    """Bytes of the logits of a chunk of tokens, in float32, and of their gradient."""
    vocabulary = _vocabulary(job)
    chunk = min(tokens * vocabulary, max(LOGITS, LOGIT_TOKENS * vocabulary))
    return chunk * (4 + BYTES[job.model.dtype])


def _vocabulary(job: MemoryDemand) -> float:
    """Outputs of the head on one rank."""
    return job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) if job.head == "lm" else 1


def _projection(job: MemoryDemand) -> float:
    """Elements of the head's matrix on one rank."""
    return _vocabulary(job) * job.shape.hidden


def _accumulates(job: MemoryDemand) -> bool:
    """Whether an optimizer step may have several micro-batches."""
    return job.lengths is None or _tokens_of_rank(job, job.lengths) > (
        job.model.max_tokens_per_microbatch
    )


def _layers_in_flight(job: MemoryDemand) -> float:
    """Return the layers times micro-batches whose activations the first stage keeps.

    It keeps p micro-batches of L / p layers with the 1F1B schedule, more with the interleaved one
    (Korthikanti et al. 2022).
    """
    pp, sizes = job.allocation.sizes["pp"], job.model.model
    virtual = (sizes.virtual_pipeline_model_parallel_size if sizes else None) or 1
    return job.shape.layers * (1 + (pp - 1) / (pp * virtual) if virtual > 1 else 1)


def kv_bytes_per_token(shape: ModelShape, allocation: Allocation, dtype: str) -> float:
    """Bytes per token on one rank: a key and a value for each of its heads and layers."""
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
    """Bytes of the copies of matrices with which the built-in engine generates on CPUs."""
    own, model = parameters(job.shape, job.allocation, "lm"), job.model
    copied = job.on_cpus and (model.dtype, model.implementation) == ("float32", "builtin")
    if not copied or own.total * FLOAT32 > PACKED_BYTES:
        return 0
    head = job.shape.vocabulary_of_rank(job.allocation.sizes["tp"]) * job.shape.hidden
    layers = own.dense - (head if job.shape.tied else 2 * head)
    sparse = job.shape.expert_layers or uses_sequence_parallel(model, job.allocation)
    if adapts(job) or (sparse and job.allocation.sizes["tp"] > 1):
        layers = 0  # short_forward does not copy them
    return (layers + head) * FLOAT32


def _cache(job: MemoryDemand, sequences: int) -> int:
    """Return the bytes of keys and values of sequences at full length.

    They include the experts of the sequences if the built-in engine keeps these next to them.
    """
    tokens = sequences * job.lengths.longest if job.lengths is not None else 0
    each = kv_bytes_per_token(job.shape, job.allocation, job.model.dtype)
    if job.replays_experts and job.allocation.backend in BUILT_IN:
        each += beside_cache(job.shape)
    return round(tokens * each)


def whole_weights(shape: ModelShape, allocation: Allocation, dtype: str) -> float:
    """Bytes of a language model's weights on one rank, all shards gathered."""
    return parameters(shape, allocation, "lm").total * BYTES[dtype]


def _prefill(job: MemoryDemand, lengths: Lengths) -> float:
    """Bytes of one layer's activations for the prompts that are read at a time."""
    prompt = lengths.longest - lengths.new_tokens
    prompts = -(-lengths.sequences // (lengths.group * job.allocation.sizes["dp"]))
    tokens = max(min(job.model.max_tokens_per_microbatch, prompts * prompt), prompt)
    return layer_activations(job) * tokens * BYTES[job.model.dtype]


def _drawing(job: MemoryDemand, sequences: int) -> float:
    """Bytes to sample a token of each sequence."""
    return sequences * job.shape.vocabulary * (BYTES[job.model.dtype] + DRAWING_BYTES)
