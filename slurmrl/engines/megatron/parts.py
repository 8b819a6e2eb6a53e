"""The shards of a model's parameters in the parameters of megatron's modules. Torch-free.

Every shard is contiguous in its storage. ``linear_qkv`` holds the queries, keys and values of one
head group after those of another, ``linear_fc1`` the gates before the other half. Rows of the
vocabulary beyond its size are padding. A storage is named by its chunk and its parameter:
``0.output_layer.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from slurmrl.engines.megatron.place import Place, Stage
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.shapes import EMBEDDING, LM_HEAD, VALUE_HEAD, parameter_shapes
from slurmrl.tensors.layout.box import Box, Index, flat_range
from slurmrl.tensors.layout.layout import Layout, TensorSpec
from slurmrl.tensors.layout.shard import Shard

Parts = dict[str, list[Shard]]
"""Shards by storage."""
Rows = tuple[str, int, int]
"""A parameter, and which of its rows: first and number."""
SHAPES = ("weight", "bias")
EXPERTS = {
    False: "experts.local_experts.{index}.linear_{matrix}.weight",
    True: "experts.linear_{matrix}.weight{index}",
}
"""Where an expert's matrices are: each in a module of its own, or grouped."""


def parts_of(
    config: ModelConfig, head: Head, place: Place, vocabulary: int, *, grouped: bool
) -> Parts:
    """All shards of a rank; ``vocabulary`` is the padded number of rows; ``grouped`` where one
    module has the experts of a layer."""
    return _Parts(config, head, place, vocabulary, EXPERTS[grouped]).parts


def padded(rows: int, multiple: int) -> int:
    """Rows of the vocabulary, padded to be divisible."""
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
    """The layout of all ranks at ``places``; other arguments as for `parts_of`."""
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
    return Layout.of(specs, [rows[place] for place in places])


def part_of_flat(shards: Iterable[Shard], first: int, last: int) -> Iterator[Shard]:
    """The parts of contiguous shards of one storage in its elements ``first`` to ``last``, as
    shards of a storage of those elements only."""
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
        self.shapes: Mapping[str, Index] = parameter_shapes(config, head)
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
        else:
            self._mlp(f"{storage}mlp.", f"{name}mlp.")

    def _attention(self, storage: str, name: str) -> None:
        config, place = self.config, self.place
        size, shared = config.head_dim, config.num_heads // config.num_kv_heads
        groups = config.num_kv_heads // place.tp
        rows: list[Rows] = []
        for group in range(groups * place.tp_rank, groups * (place.tp_rank + 1)):
            rows.append((f"{name}q_proj", group * shared * size, shared * size))
            rows += [(f"{name}{part}_proj", group * size, size) for part in "kv"]
        self._columns(f"{storage}linear_qkv", rows)
        self._inner(f"{storage}linear_proj", f"{name}o_proj", place.tp, place.tp_rank)
        if config.qk_norm:
            for part in "qk":
                self._whole(f"{storage}{part}_layernorm.weight", f"{name}{part}_norm.weight")

    def _mlp(self, storage: str, name: str) -> None:
        rows = self.config.intermediate_size // self.place.tp
        first = rows * self.place.tp_rank
        halves = [(f"{name}{half}_proj", first, rows) for half in ("gate", "up")]
        self._columns(f"{storage}linear_fc1", halves)
        down = f"{name}down_proj"
        self._inner(f"{storage}linear_fc2", down, self.place.tp, self.place.tp_rank)

    def _experts(self, storage: str, name: str, experts: int) -> None:
        place = self.place
        self._whole(f"{storage}router.weight", f"{name}gate.weight")
        local = experts // place.ep
        for index in range(local):
            expert = place.ep_rank * local + index
            for matrix, halves, split in (("fc1", ("gate", "up"), 1), ("fc2", ("down",), 2)):
                at = storage + self.expert.format(matrix=matrix, index=index)
                self._expert(at, name, halves, expert, split)

    def _expert(
        self, storage: str, name: str, halves: tuple[str, ...], expert: int, split: int
    ) -> None:
        """Matrices of one expert, whose dim ``split`` the ranks share."""
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
        """Rows of several matrices, concatenated, and of their biases."""
        for kind in SHAPES:
            if f"{rows[0][0]}.{kind}" in self.shapes:
                own = [(f"{name}.{kind}", first, number) for name, first, number in rows]
                self._rows(f"{storage}.{kind}", own)

    def _inner(self, storage: str, name: str, parts: int, part: int) -> None:
        """A matrix whose inputs are split; every rank has its bias."""
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
