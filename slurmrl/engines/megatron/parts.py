"""Place a model's parameters in the parameters of megatron's modules. Torch-free.

The module also checks which architectures the megatron engine runs.

Every shard is contiguous in its storage. ``linear_qkv`` has one head group after another, each with
its queries, keys and values. ``linear_fc1`` has the gates before the up-projections. Rows after the
last token of the vocabulary are padding. A storage is named by its chunk and its parameter:
``0.output_layer.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.family_rules import Latent
from slurmrl.models.shapes import (
    EMBEDDING,
    LM_HEAD,
    VALUE_HEAD,
    constant_specs,
    parameter_shapes,
    stored_shapes,
)
from slurmrl.tensors.layout import Box, Index, Layout, Shard, TensorSpec, flat_range
from slurmrl.tensors.parallel.topology import ProcessTopology

Parts = dict[str, list[Shard]]
"""Shards by storage."""
Rows = tuple[str, int, int]
"""Name of a parameter, its first row and its number of rows."""
SHAPES = ("weight", "bias")
CORRECTION = "e_score_correction_bias"
"""Name of a router's correction bias, in megatron's module and in the model."""
EXPERTS = {
    False: "experts.local_experts.{index}.linear_{matrix}.weight",
    True: "experts.linear_{matrix}.weight{index}",
}
"""Storage of an expert's matrix. The key is true if one module has all experts' matrices."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One model chunk of a rank: its layers, and whether it embeds tokens or makes outputs."""

    index: int
    first_layer: int
    layers: int
    embeds: bool
    ends: bool

    def blocks(self, config: ModelConfig) -> slice:
        """Return the chunk's blocks with experts, as a slice of all blocks with experts."""
        sparse = () if config.moe is None else config.moe.layers
        first = sum(layer < self.first_layer for layer in sparse)
        last = sum(layer < self.first_layer + self.layers for layer in sparse)
        return slice(first, last)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's coordinates and sizes along the tensor, pipeline and expert axes.

    A rank has ``virtual`` chunks of the pipeline. ``etp`` is the tensor axis of experts. Ranks
    along the data and context axes have copies.
    """

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    virtual: int = 1
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0

    def stages(self, layers: int) -> Iterator[Stage]:
        """Yield this rank's chunks in order. Chunks alternate over the pipeline's ranks."""
        count = layers // (self.pp * self.virtual)
        for index in range(self.virtual):
            number = index * self.pp + self.pp_rank
            yield Stage(
                index=index,
                first_layer=number * count,
                layers=count,
                embeds=number == 0,
                ends=number == self.pp * self.virtual - 1,
            )


def place_of(
    topology: ProcessTopology, experts: ProcessTopology | None, virtual: int, rank: int
) -> Place:
    """Return a rank's place. Experts without their own grid are split like other matrices."""
    sizes, at = dict(zip(topology.axes, topology.sizes, strict=True)), topology.coordinates(rank)
    tp, tp_rank = sizes.get("tp", 1), at.get("tp", 0)
    own: Mapping[str, int] = {"tp": tp, "ep": 1}
    there: Mapping[str, int] = {"tp": tp_rank, "ep": 0}
    if experts is not None:
        own = dict(zip(experts.axes, experts.sizes, strict=True))
        there = experts.coordinates(rank)
    return Place(
        tp=tp,
        tp_rank=tp_rank,
        pp=sizes.get("pp", 1),
        pp_rank=at.get("pp", 0),
        virtual=virtual,
        ep=own["ep"],
        ep_rank=there["ep"],
        etp=own["tp"],
        etp_rank=there["tp"],
    )


def parts_of(
    config: ModelConfig, head: Head, place: Place, vocabulary: int, *, grouped: bool
) -> Parts:
    """Return all shards of a rank.

    ``vocabulary`` is the padded number of rows. With ``grouped``, one module has all experts of a
    layer.
    """
    return _Parts(config, head, place, vocabulary, EXPERTS[grouped]).parts


def padded(rows: int, multiple: int) -> int:
    """Return ``rows``, rounded up to a multiple of ``multiple``."""
    return -(-rows // multiple) * multiple


def layout_of(
    config: ModelConfig,
    head: Head,
    dtype: str,
    places: Sequence[Place],
    vocabulary: int,
    *,
    grouped: bool,
) -> Layout:
    """Return the layout of ranks at ``places``; other arguments as for `parts_of`."""
    rows = {
        place: [
            shard
            for own in parts_of(config, head, place, vocabulary, grouped=grouped).values()
            for shard in own
        ]
        for place in set(places)
    }
    shapes = parameter_shapes(config, head)
    specs = {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
    specs |= constant_specs(config)
    return Layout.of(specs, [rows[place] for place in places])


def part_of_flat(shards: Iterable[Shard], first: int, last: int) -> Iterator[Shard]:
    """Yield the parts of contiguous shards in elements ``first`` to ``last`` of their storage.

    The offsets of the parts count from ``first``.
    """
    for shard in shards:
        begin, end = max(first, shard.offset), min(last, shard.offset + shard.box.count)
        offset = begin - first
        for box in flat_range(shard.box.size, begin - shard.offset, end - shard.offset):
            start = tuple(a + b for a, b in zip(shard.box.start, box.start, strict=True))
            yield Shard.contiguous(shard.name, Box(start, box.size), shard.storage, offset)
            offset += box.count


class _Parts:
    def __init__(
        self, config: ModelConfig, head: Head, place: Place, vocabulary: int, expert: str
    ) -> None:
        self.config, self.place, self.expert = config, place, expert
        self.shapes: Mapping[str, Index] = stored_shapes(config, head)
        self.parts: Parts = {}
        for stage in place.stages(config.num_layers):
            if stage.embeds:
                self._vocabulary(stage, "embedding.word_embeddings.weight", EMBEDDING, vocabulary)
            for layer in range(stage.layers):
                self._layer(f"{stage.index}.decoder.layers.{layer}.", stage.first_layer + layer)
            if stage.ends:
                self._whole(f"{stage.index}.decoder.final_layernorm.weight", "model.norm.weight")
                self._head(stage, head, vocabulary)

    def _head(self, stage: Stage, head: Head, vocabulary: int) -> None:
        if head == "value":
            self._whole(f"{stage.index}.output_layer.weight", VALUE_HEAD)
        elif not self.config.tie_embeddings:
            self._vocabulary(stage, "output_layer.weight", LM_HEAD, vocabulary)
        elif not stage.embeds:
            self._vocabulary(stage, "output_layer.weight", EMBEDDING, vocabulary)

    def _vocabulary(self, stage: Stage, storage: str, name: str, vocabulary: int) -> None:
        rows = vocabulary // self.place.tp
        first = rows * self.place.tp_rank
        kept = max(0, min(first + rows, self.config.vocab_size) - first)
        self._rows(f"{stage.index}.{storage}", [(name, first, kept)])

    def _layer(self, storage: str, layer: int) -> None:
        name = f"model.layers.{layer}."
        self._whole(f"{storage}input_layernorm.weight", f"{name}input_layernorm.weight")
        self._whole(f"{storage}pre_mlp_layernorm.weight", f"{name}post_attention_layernorm.weight")
        self._attention(f"{storage}self_attention.", f"{name}self_attn.")
        moe = self.config.moe
        if moe is not None and layer in moe.layers:
            self._experts(f"{storage}mlp.", f"{name}mlp.", moe.experts)
            if moe.shared:
                self._mlp(f"{storage}mlp.shared_experts.", f"{name}mlp.shared_experts.", moe.shared)
            if moe.corrected:
                self._whole(f"{storage}mlp.router.{CORRECTION}", f"{name}mlp.gate.{CORRECTION}")
        else:
            self._mlp(f"{storage}mlp.", f"{name}mlp.", self.config.intermediate_size)

    def _attention(self, storage: str, name: str) -> None:
        config, place = self.config, self.place
        if config.latent is not None:
            self._latent(storage, name, config.latent)
            return
        size, shared = config.head_dim, config.num_heads // config.num_kv_heads
        groups = config.num_kv_heads // place.tp
        rows: list[Rows] = []
        for group in range(groups * place.tp_rank, groups * (place.tp_rank + 1)):
            rows.append((f"{name}q_proj", group * shared * size, shared * size))
            rows += [(f"{name}{part}_proj", group * size, size) for part in "kv"]
        self._columns(f"{storage}linear_qkv", rows)
        if config.family.sinks:
            own = groups * shared
            at = f"{storage}core_attention.sinks"
            self._rows(at, [(f"{name}sinks", own * place.tp_rank, own)])
        self._inner(f"{storage}linear_proj", f"{name}o_proj", place.tp, place.tp_rank)
        if config.qk_norm:
            for part in "qk":
                self._whole(f"{storage}{part}_layernorm.weight", f"{name}{part}_norm.weight")

    def _latent(self, storage: str, name: str, latent: Latent) -> None:
        place, queries = self.place, "q_b_proj"
        vectors = ["q", "kv"]
        if latent.query_rank is None:
            vectors, queries = ["kv"], "q_proj"
        for part in vectors:
            product = "kv_a_proj_with_mqa" if part == "kv" else "q_a_proj"
            self._whole(f"{storage}{part}_down.weight", f"{name}{product}.weight")
            self._whole(f"{storage}{part}_norm.weight", f"{name}{part}_a_layernorm.weight")
        for part, product in (("q", queries), ("kv", "kv_b_proj")):
            rows = self.shapes[f"{name}{product}.weight"][0] // place.tp
            own = [(f"{name}{product}", rows * place.tp_rank, rows)]
            self._columns(f"{storage}{part}_up", own)
        self._inner(f"{storage}linear_proj", f"{name}o_proj", place.tp, place.tp_rank)

    def _mlp(self, storage: str, name: str, inner: int) -> None:
        rows = inner // self.place.tp
        first = rows * self.place.tp_rank
        halves = [(f"{name}{half}_proj", first, rows) for half in ("gate", "up")]
        self._columns(f"{storage}linear_fc1", halves)
        down = f"{name}down_proj"
        self._inner(f"{storage}linear_fc2", down, self.place.tp, self.place.tp_rank)

    def _experts(self, storage: str, name: str, experts: int) -> None:
        place = self.place
        self._whole(f"{storage}router.weight", f"{name}gate.weight")
        local, gates = experts // place.ep, ["gate", "up"]
        clamped = f"{name}gate.bias" in self.shapes
        if clamped:
            self._whole(f"{storage}router.bias", f"{name}gate.bias")
            gates = ["gate_up"]
        for index in range(local):
            expert = place.ep_rank * local + index
            for matrix, halves, split in (("fc1", gates, 1), ("fc2", ["down"], 2)):
                at = storage + self.expert.format(matrix=matrix, index=index)
                self._expert(at, name, halves, expert, split)
                if clamped:
                    bias = f"{name}experts.{halves[0]}_proj_bias"
                    box = Box((expert, 0), (1, self.shapes[bias][1]))
                    at = at.replace("weight", "bias")
                    self.parts[at] = [Shard.contiguous(bias, box, at)]

    def _expert(self, storage: str, name: str, halves: list[str], expert: int, split: int) -> None:
        """Add the matrices of one expert. Ranks split the matrices along dim ``split``."""
        offset, shards = 0, []
        for half in halves:
            full = f"{name}experts.{half}_proj"
            start, size = [expert, 0, 0], [1, *self.shapes[full][1:]]
            size[split] //= self.place.etp
            start[split] = size[split] * self.place.etp_rank
            box = Box(tuple(start), tuple(size))
            shards.append(Shard.contiguous(full, box, storage, offset))
            offset += box.count
        self.parts[storage] = shards

    def _columns(self, storage: str, rows: list[Rows]) -> None:
        """Add concatenated rows of several matrices, and of their biases."""
        for kind in SHAPES:
            if f"{rows[0][0]}.{kind}" in self.shapes:
                own = [(f"{name}.{kind}", first, number) for name, first, number in rows]
                self._rows(f"{storage}.{kind}", own)

    def _inner(self, storage: str, name: str, parts: int, part: int) -> None:
        """Add a matrix whose inputs are split; every rank has the whole bias."""
        rows, columns = self.shapes[f"{name}.weight"]
        width = columns // parts
        box = Box((0, width * part), (rows, width))
        weight = f"{storage}.weight"
        self.parts[weight] = [Shard.contiguous(f"{name}.weight", box, weight)]
        if f"{name}.bias" in self.shapes:
            self._whole(f"{storage}.bias", f"{name}.bias")

    def _rows(self, storage: str, rows: Iterable[Rows]) -> None:
        offset, shards = 0, []
        for name, first, number in rows:
            inner = self.shapes[name][1:]
            box = Box((first, *(0 for _ in inner)), (number, *inner))
            if box.count:
                shards.append(Shard.contiguous(name, box, storage, offset))
            offset += box.count
        self.parts[storage] = shards

    def _whole(self, storage: str, name: str) -> None:
        box = Box.whole(self.shapes[name])
        self.parts[storage] = [Shard.contiguous(name, box, storage)]


def misfits(
    config: ModelConfig,
    place: Place,
    vocabulary: int,
    *,
    trains_whole: bool = False,
) -> Iterator[str]:
    """Yield the reasons why a model cannot be split in this way.

    ``vocabulary`` is the padded number of rows; ``trains_whole`` means training without sequence
    parallelism. (The plan checks this too. megatron itself would silently drop layers or heads.)
    """
    heads, moe = config.num_heads, config.moe
    parts = [
        (f"t{place.tp}", place.tp, "num_attention_heads", heads),
        (f"t{place.tp}", place.tp, "num_key_value_heads", config.num_kv_heads),
        (
            f"p{place.pp}" + (f" times {place.virtual} chunks" if place.virtual > 1 else ""),
            place.pp * place.virtual,
            "num_hidden_layers",
            config.num_layers,
        ),
    ]
    if moe is None or len(moe.layers) < config.num_layers:
        parts.append((f"t{place.tp}", place.tp, "intermediate_size", config.intermediate_size))
    if moe is not None:
        parts.append((f"e{place.ep}", place.ep, "the number of experts", moe.experts))
        parts.append((f"t{place.etp} of experts", place.etp, "their inner size", moe.inner))
        parts.append((f"t{place.tp}", place.tp, "the inner size of shared experts", moe.shared))
    for spelled, size, what, number in parts:
        if number % size:
            yield f"{spelled} does not divide {what} {number}"
    if moe is not None and moe.clamp is not None and place.etp > 1:
        yield f"t{place.etp} of experts cannot split their biases; give experts a layout without t"
    if moe is not None and place.tp > 1 and trains_whole:
        yield f"on t{place.tp}, experts can be trained only with sequence parallelism"
    if vocabulary // place.tp * (place.tp - 1) >= config.vocab_size:
        yield f"t{place.tp} leaves a rank without a token of the vocabulary of {config.vocab_size}"


class MegatronModel:
    """Reader of the architectures that the megatron engine runs, for the plan."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> ModelConfig:
        """Read a ``config.json`` object.

        Raises UsageError for parts that the engine does not run.
        """
        config = ModelConfig.from_hf(values, strict=strict)
        check(config)
        return config


def check(config: ModelConfig) -> None:
    """Raise UsageError if megatron-core has no modules for an architecture."""
    problems = []
    family, moe = config.family, config.moe
    clamped = moe is not None and moe.clamp is not None
    biased = config.mlp_bias or clamped
    if family.norm_bias or not family.gated or config.rope is None:
        problems.append(
            "the engine needs rotary positions, gated feed-forward blocks and RMS norms"
        )
    elif config.o_bias != biased or (config.o_bias and not config.qkv_bias):
        problems.append(
            "megatron-core supports biases in all matrices, or only in the matrices of queries, "
            "keys and values"
        )
    if moe and config.o_bias and not clamped:
        problems.append("megatron-core does not support experts in a model with attention_bias")
    if moe and moe.normalized and moe.per_token == 1:
        problems.append(
            "num_experts_per_tok 1 with norm_topk_prob gives every expert the weight 1, so the "
            "router would get no gradient"
        )
    if problems:
        raise UsageError(
            f"the megatron engine does not run this {config.model_type} model: "
            + "; ".join(problems)
        )
