"""The files of a model folder, the sizes of its architecture, and the sequence lengths of a step.

The sizes come from a Hugging Face ``config.json``. Only the engines decide if they can run a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from slurmrl.config.allocation import Allocation
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.config.schema import Config, Dataset, Model, evaluation_key
from slurmrl.config.source import KeyPath
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.dataflow import Head
from slurmrl.plan.engine_rules import HF
from slurmrl.plan.estimates.latent_shape import QUERY_RANK, LatentShape, latent_shape, size_in
from slurmrl.registry import resolve
from slurmrl.tensors.parallel.topology import exchanges_heads

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
EOS: Final = "eos_token_id"
SCORE_AT: Final = "slurmrl_score_at"
"""Key of a reward model's ``config.json`` with the token at which the model was trained to score.
"""
TURN_END: Final = "turn_end"
"""Value for scores at the end of the answer's turn. Without the key, a model scores at the end of
the rendered conversation, where some chat templates add a newline."""


def config_values(model: Model) -> dict[str, Any]:
    """Return the ``config.json`` object of a role: its ``architecture``, or the file of its folder.

    The object has the mark of `Model.marked`. Raises UsageError.
    """
    if model.architecture is not None:
        return model.marked(model.architecture)
    if model.path is None:
        return {}
    return model.marked(inputs.read_json(Path(model.path) / CONFIG))


def known_config(model: Model) -> dict[str, Any]:
    """Return `config_values`; empty for an unreadable file, which the check of weights reports."""
    try:
        return config_values(model)
    except UsageError:
        return {}


def generation_values(model: Model) -> dict[str, Any]:
    """Return the ``generation_config.json`` object of a role's folder; empty without the file.

    Raises UsageError.
    """
    if model.path is None:
        return {}
    folder = Path(model.path)
    names = inputs.list_names(folder)
    if CONFIG not in names:
        raise inputs.missing(folder / CONFIG, f"{folder} has no {CONFIG}")
    return inputs.read_json(folder / GENERATION_CONFIG) if GENERATION_CONFIG in names else {}


def stop_tokens(config: Config, ends: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the tokens that end a completion of the actor.

    The result has each ``eos_token_id`` of ``generation_config.json`` and ``config.json``, the
    ``ends`` of the tokenizer and the chat templates (`data.chat.stop_ids`), and
    ``rollout.stop_token_ids``. Omit ids outside the vocabulary, which some files contain.

    Raises UsageError for an ``eos_token_id`` that is neither a number nor a list of numbers.
    """
    values = config_values(config.actor)
    text = text_config(values)
    found = [
        *_eos(generation_values(config.actor), GENERATION_CONFIG),
        *_eos(values, CONFIG),
        *_eos(text, CONFIG),
        *ends,
        *config.rollout.stop_token_ids,
    ]
    size = vocabulary(values)
    valid = (token for token in found if token >= 0 and (not size or token < size))
    return tuple(dict.fromkeys(valid))


def scored_at_turn_end(model: Model) -> bool:
    """Return whether a reward model scores at the end of the answer's turn. Raises UsageError."""
    return config_values(model).get(SCORE_AT) == TURN_END


def vocabulary(values: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary in a ``config.json`` object; None without it."""
    for section in (values, text_config(values)):
        size = section.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a multimodal ``config.json``. Return other objects unchanged."""
    text = values.get("text_config")
    return text if isinstance(text, Mapping) else values


def _eos(values: Mapping[str, Any], file: str) -> list[int]:
    stated = values.get(EOS)
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in listed):
        raise UsageError(f"{file}: {EOS} is {stated!r}, must be a token id or a list of token ids")
    return listed


FAMILIES: Final = "slurmrl.models.families:FAMILIES"
"""The built-in decoder's table of families. The table has the defaults of missing fields."""
WHOLE_ATTENTION: Final = "slurmrl.models.hf_config:WHOLE_ATTENTION"
TOWER: Final = "slurmrl.models.hf_pictures:text_and_tower"
RANK_ELEMENTS: Final = "slurmrl.models.hf_tensor:rank_elements"
MOST_LAYERS: Final = 10**5
PLAIN_MLP: Final = frozenset({"gpt2", "gpt_neox", "opt", "phi"})
"""Families whose feed-forward block has two matrices; other families also have a gate."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of an architecture, as numbers of elements, heads or layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int | None
    tied: bool
    mlp_matrices: int = 3
    experts: int = 0
    """Number of experts in a layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    """Inner size of the shared experts, which process every token."""
    biased_experts: bool = False
    dense_layers: int = 0
    """Number of layers without experts in a model with experts."""
    equal_vocabulary: bool = False
    """Whether tensor ranks repeat a vocabulary that t does not divide (models of transformers)."""
    whole_attention: bool = False
    """Whether each tensor rank has all heads (some families of transformers)."""
    latent: LatentShape | None = None
    """Sizes of latent attention; ``head_dim`` is then `LatentShape.head`."""
    tower: int = 0
    """Number of elements of an image encoder."""
    counted: str = ""
    """The ``config.json`` object as JSON, if tensor ranks share a model of transformers by the plan
    of its family; empty for all other models."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    def attention_elements(self, tp: int) -> float:
        """Return the elements of an attention block per tensor rank, without copies of heads."""
        if self.latent is not None:
            return self.latent.elements(self.attention_ranks(tp))
        return 2 * self.hidden * (self.queries + self.keys) / self.attention_ranks(tp)

    def cache_elements(self, allocation: Allocation) -> int:
        """Return the cached elements per token, layer and rank. Servers cache latent vectors."""
        if self.latent is not None and BACKENDS[allocation.backend].serves:
            return self.latent.cached
        return 2 * self.kv_heads_of_rank(allocation.sizes["tp"]) * self.head_dim

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def vocabulary_of_rank(self, tp: int) -> float:
        """Return the number of rows of the embedding on one tensor rank."""
        return self.vocabulary / (1 if self.equal_vocabulary and self.vocabulary % tp else tp)

    def attention_ranks(self, tp: int) -> int:
        """Return the number of tensor ranks that share the heads of attention."""
        return 1 if self.whole_attention else tp

    def kv_heads_of_rank(self, tp: int) -> int:
        """Return the key-value heads of one tensor rank; ranks copy heads if there are too few."""
        return max(1, -(-self.kv_heads // self.attention_ranks(tp)))


def shape_of(model: Model) -> ModelShape | None:
    """Return the shape of a role's architecture; None if it is unknown or incomplete."""
    values = known_config(model)
    shape = read(values) if values else None
    if shape is None and model.implementation == HF and "vision_config" in values:
        shape = _with_tower(json.dumps(values, sort_keys=True))
    if shape is None or model.implementation != HF:
        return shape
    whole = values.get("model_type") in resolve(WHOLE_ATTENTION)
    counted = "" if shape.tower else json.dumps(values, sort_keys=True)
    return replace(shape, equal_vocabulary=True, whole_attention=whole, counted=counted)


@lru_cache(maxsize=8)
def _with_tower(values: str) -> ModelShape | None:
    """Return the shape of a model of transformers that reads images."""
    text, tower = resolve(TOWER)(json.loads(values))
    shape = read(text)
    return shape and replace(shape, tower=tower)


def read(values: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape in a ``config.json`` object; None if sizes are missing."""
    family = resolve(FAMILIES).get(values.get("model_type"))
    stated = {name: value for name, value in values.items() if value is not None}
    full = {**(family.defaults if family else {}), **stated}
    hidden = _number(full, "hidden_size", "n_embd", "d_model")
    layers = _number(full, "num_hidden_layers", "n_layer")
    heads = _number(full, "num_attention_heads", "n_head")
    vocabulary = _number(full, "vocab_size")
    if not (hidden and layers and heads and vocabulary) or layers > MOST_LAYERS:
        return None
    inner = _number(full, "intermediate_size", "n_inner") or 4 * hidden
    # If the file sets the rank to null, queries are computed directly from hidden states.
    query_rank = {name: values[name] for name in (QUERY_RANK,) if name in values}
    latent = latent_shape({**full, **query_rank}, hidden, heads)
    head_dim = latent.head if latent else _number(full, "head_dim") or max(hidden // heads, 1)
    typed = bool(family and family.experts and family.experts.typed)
    experts = _number(full, "num_experts", "num_local_experts", "n_routed_experts") or 0
    return ModelShape(
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=_number(full, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        positions=_number(full, "max_position_embeddings", "n_positions"),
        tied=full.get("tie_word_embeddings") is True,
        mlp_matrices=2 if full.get("model_type") in PLAIN_MLP else 3,
        experts=experts,
        experts_per_token=_number(full, "num_experts_per_tok") or min(2, experts),
        expert_inner=_number(full, "moe_intermediate_size") or inner,
        shared_inner=_shared(full),
        biased_experts=bool(family and family.experts and family.experts.clamped),
        dense_layers=_dense_layers(full, layers, typed=typed),
        latent=latent,
    )


def _number(values: Mapping[str, Any], *names: str) -> int | None:
    return next((size for name in names if (size := size_in(values, name))), None)


def _shared(values: Mapping[str, Any]) -> int:
    number = _number(values, "n_shared_experts") or 0
    size = _number(values, "moe_intermediate_size") or 0
    return _number(values, "shared_expert_intermediate_size") or number * size


def _dense_layers(values: Mapping[str, Any], layers: int, *, typed: bool) -> int:
    types = values.get("mlp_layer_types")
    if typed:
        return types.count("dense") if isinstance(types, list) else 1
    listed = values.get("mlp_only_layers")
    dense = listed if isinstance(listed, list) else []
    first, step = _number(values, "first_k_dense_replace"), _number(values, "decoder_sparse_step")
    return sum(n < (first or 0) or n in dense or (n + 1) % (step or 1) > 0 for n in range(layers))


@dataclass(frozen=True)
class Parameters:
    """Numbers of elements on one rank before sharding; experts have a separate layout."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def layer_parameters(shape: ModelShape, allocation: Allocation, *, moe: bool) -> Parameters:
    """Return the parameters of one layer on one tensor rank, without biases."""
    tp = allocation.sizes["tp"]
    if (own := _counted(shape, tp, "lm")) is not None:
        return Parameters(*(own.expert_layer if moe else own.dense_layer))
    queries = shape.queries / shape.attention_ranks(tp)
    keys = shape.kv_heads_of_rank(tp) * shape.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys) + 2 * shape.hidden
    if shape.latent is not None:
        attention = shape.attention_elements(tp) + shape.latent.norms + 2 * shape.hidden
    if not moe:
        return Parameters(attention + shape.mlp_matrices * shape.hidden * shape.inner / tp, 0)
    expert = shape.mlp_matrices * shape.hidden * shape.expert_inner
    shared = shape.mlp_matrices * shape.hidden * shape.shared_inner / tp
    own = shape.experts / allocation.sizes["ep"] * expert / expert_tp(allocation)
    return Parameters(attention + shape.hidden * shape.experts + shared, own)


def _counted(shape: ModelShape, tp: int, head: Head) -> Any:
    """Return the `RankElements` of a tensor rank; None if they follow from the sizes."""
    return resolve(RANK_ELEMENTS)(shape.counted, head, tp) if shape.counted and tp > 1 else None


def passes_keys(shape: ModelShape, allocation: Allocation) -> bool:
    """Return whether context ranks pass on keys and values instead of exchanging heads."""
    tp, cp = allocation.sizes["tp"], allocation.sizes["cp"]
    return cp > 1 and not exchanges_heads(shape.heads, shape.kv_heads, tp, cp)


def expert_tp(allocation: Allocation) -> int:
    """Return the tensor-parallel size of the experts. The default is the model's size."""
    return allocation.experts.tp if allocation.experts else allocation.sizes["tp"]


def uses_sequence_parallel(model: Model, allocation: Allocation) -> bool:
    """Return the role's setting, which is by default true for Megatron with tensor parallelism."""
    setting = model.model.sequence_parallel if model.model else None
    if setting is None:
        return allocation.backend == "megatron" and allocation.sizes["tp"] > 1
    return setting


def parameters(shape: ModelShape, allocation: Allocation, head: Head) -> Parameters:
    """Return the parameters of the fullest pipeline stage."""
    pp, tp = allocation.sizes["pp"], allocation.sizes["tp"]
    if (own := _counted(shape, tp, head)) is not None:
        return Parameters(own.dense, own.experts)
    plain = layer_parameters(shape, allocation, moe=False)
    moe = layer_parameters(shape, allocation, moe=True)
    count, sparse = shape.layers / pp, shape.expert_layers / pp
    dense = (count - sparse) * plain.dense + sparse * moe.dense
    embedding = shape.vocabulary_of_rank(tp) * shape.hidden
    outputs = embedding if head == "lm" else shape.hidden
    last = 0.0 if shape.tied and head == "lm" and pp == 1 else outputs
    ends = embedding + last if pp == 1 else max(embedding, last)
    return Parameters(dense + ends + shape.hidden + shape.tower, sparse * moe.experts)


def copies_of(allocation: Allocation) -> tuple[int, int]:
    """Return the numbers of replicas of dense parameters and of experts."""
    dense = allocation.sizes["dp"] * allocation.sizes["cp"]
    return dense, allocation.experts.dp if allocation.experts else dense


def shard_parameters(shape: ModelShape, allocation: Allocation, head: Head) -> float:
    """Return the elements of one rank's shard. Parameters are sharded over their replicas."""
    own = parameters(shape, allocation, head)
    dense, experts = copies_of(allocation)
    return own.dense / dense + own.experts / experts


KEPT_BY_SERVERS: Final = 8
"""Number of tokens of a model's context that a server may reserve. SGLang reserves 5."""
LONGEST_ROW: Final = "slurmrl.data.records:longest_row"
"""Name of a function in a room that ``plan`` must not import."""
TRAINING: Final = ("dataset",)
"""Key of the training dataset."""


@dataclass(frozen=True)
class Lengths:
    """The number and the maximum length of the sequences in a step."""

    sequences: int
    """Number of sequences on all ranks."""
    longest: int
    """Maximum length of a sequence in tokens."""
    new_tokens: int
    """Number of generated tokens in the longest sequence."""
    assumed: bool
    """Whether the configuration sets no bound, so that ``longest`` is the model's maximum."""
    group: int = 1
    """Number of sequences of an item. Generation prefills a prompt once for all completions."""


def lengths_of(config: Config, algorithm: Algorithm, shape: ModelShape | None) -> Lengths | None:
    """Return the lengths of a step; None if neither the configuration nor the model bounds them."""
    new = config.rollout.most_tokens if config.dataset.kind == "prompt" else 0
    group = algorithm.sequences_per_item(config)
    sequences = algorithm.batch_size * group
    bound = longest(config.dataset, new)
    if bound is not None:
        return Lengths(sequences, bound, new, assumed=False, group=group)
    if shape is None or shape.positions is None:
        return None
    return Lengths(sequences, max(shape.positions, new), new, assumed=True, group=group)


def as_long_as_rows(config: Config, algorithm: Algorithm) -> Config:
    """Return the configuration with the longest row of the training data as the length limit.

    The limit changes only if the configuration allows longer rows than the data has.
    """
    dataset = config.dataset
    rows = resolve(LONGEST_ROW)(dataset)
    allowed = lengths_of(config, algorithm, shape_of(config.actor))
    if rows is None or allowed is None or rows + allowed.new_tokens >= allowed.longest:
        return config
    key = "max_prompt_tokens" if dataset.kind == "prompt" else "max_tokens"
    return config.model_copy(update={"dataset": dataset.model_copy(update={key: rows})})


def bounded_parts(config: Config) -> Iterator[tuple[KeyPath, Dataset, int]]:
    """Yield key, dataset and maximum new tokens of training and of each evaluation."""
    new = config.rollout.most_tokens
    yield TRAINING, config.dataset, new
    for suite, own in config.evaluations.items():
        assert own.evaluation is not None, "one of `evaluations`"
        limit = None if config.rollout.episode.has_turns else own.evaluation.max_new_tokens
        yield (*evaluation_key(suite), "dataset"), own.held_out, limit or new


def least_context(config: Config, *, assumed: bool = True) -> int:
    """Return the maximum tokens of a prompt and its completion that a server must accept.

    Only datasets for which servers generate count. With ``assumed``, a dataset without a bound
    needs the model's maximum; otherwise it does not count. Return 0 if no bound is known.
    """
    bounds = [
        longest(dataset, new_tokens)
        for where, dataset, new_tokens in bounded_parts(config)
        if dataset.kind == "prompt" and (where == TRAINING or config.rollout_evaluates)
    ]
    if not assumed:
        bounds = [bound for bound in bounds if bound is not None]
    shape = shape_of(config.actor)
    if shape is not None and shape.positions is not None:
        most = shape.positions - KEPT_BY_SERVERS
        bounds = [most if bound is None else min(bound, most) for bound in bounds]
    return max((bound or 0 for bound in bounds), default=0)


def longest(dataset: Dataset, new_tokens: int) -> int | None:
    """Return the maximum tokens of a sequence, including a completion of ``new_tokens``.

    Return None if the dataset sets no bound.
    """
    if dataset.kind == "prompt":
        prompt = dataset.max_prompt_tokens
        return None if prompt is None else prompt + new_tokens
    return dataset.max_tokens
