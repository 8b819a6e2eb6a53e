"""A rank's coordinates in a megatron layout. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slurmrl.models.config import ModelConfig
from slurmrl.tensors.parallel.topology import ProcessTopology


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One model chunk of a rank: its layers, and whether it embeds tokens or makes outputs."""

    index: int
    first_layer: int
    layers: int
    embeds: bool
    ends: bool

    def blocks(self, config: ModelConfig) -> slice:
        """Its blocks with experts, among those of the model."""
        sparse = () if config.moe is None else config.moe.layers
        first = sum(layer < self.first_layer for layer in sparse)
        last = sum(layer < self.first_layer + self.layers for layer in sparse)
        return slice(first, last)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates and sizes: tensor, pipeline (in ``virtual`` chunks), experts, and tensors of
    experts. What lies along data and context axes are copies."""

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
        """The chunks of this rank, in order; chunks alternate over the pipeline's ranks."""
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
    """The place of one rank. Experts without their own grid are split like other matrices."""
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


def misfits(
    config: ModelConfig,
    place: Place,
    context_ranks: int,
    vocabulary: int,
    *,
    trains_whole: bool = False,
) -> Iterator[str]:
    """Why a model cannot be split that way. ``vocabulary`` is the padded number of rows;
    ``trains_whole`` means training without sequence parallelism. (The plan checks the same.
    megatron itself would silently drop layers or heads.)"""
    heads, moe = config.num_heads, config.moe
    parts = [
        (f"t{place.tp}", place.tp, "num_attention_heads", heads),
        (f"t{place.tp}", place.tp, "num_key_value_heads", config.num_kv_heads),
        (f"c{context_ranks}", context_ranks, "the attention heads of a rank,", heads // place.tp),
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
    for spelled, size, what, number in parts:
        if number % size:
            yield f"{spelled} does not divide {what} {number}"
    if moe is not None and place.tp > 1 and trains_whole:
        yield f"experts are trained on t{place.tp} with sequence parallelism only"
    if vocabulary // place.tp * (place.tp - 1) >= config.vocab_size:
        yield f"t{place.tp} leaves a rank without a token of the vocabulary of {config.vocab_size}"
