"""Each tensor rank's part of every parameter, and the gradients that must be summed. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from slurmrl.models.adapters import LORA_B, adapted_weight
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import EMBEDDING, LM_HEAD
from slurmrl.tensors.layout import Box, Index

SPLIT_DIMS = {
    "self_attn.q_proj.weight": 0,
    "self_attn.q_proj.bias": 0,
    "self_attn.k_proj.weight": 0,
    "self_attn.k_proj.bias": 0,
    "self_attn.v_proj.weight": 0,
    "self_attn.v_proj.bias": 0,
    "self_attn.o_proj.weight": 1,
    "self_attn.q_b_proj.weight": 0,
    "self_attn.kv_b_proj.weight": 0,
    "mlp.gate_proj.weight": 0,
    "mlp.gate_proj.bias": 0,
    "mlp.up_proj.weight": 0,
    "mlp.up_proj.bias": 0,
    "mlp.down_proj.weight": 1,
    "mlp.shared_experts.gate_proj.weight": 0,
    "mlp.shared_experts.gate_proj.bias": 0,
    "mlp.shared_experts.up_proj.weight": 0,
    "mlp.shared_experts.up_proj.bias": 0,
    "mlp.shared_experts.down_proj.weight": 1,
    "mlp.experts.gate_proj": 1,
    "mlp.experts.up_proj": 1,
    "mlp.experts.down_proj": 2,
    "mlp.experts.gate_up_proj": 1,
    "mlp.experts.gate_up_proj_bias": 1,
    "self_attn.sinks": 0,
}
"""Dim along which a layer's parameters are split; all other parameters are replicated. The adapter
matrix ``lora_B`` is split with the rows of the weight, and ``lora_A`` with its columns."""
LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
"""Layers that compute latent vectors."""
KEYS_AND_VALUES = ("self_attn.k_proj.", "self_attn.v_proj.")
OF_PARTS = (
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"self_attn.{name}.{kind}" for name in LATENT for kind in ("weight", "bias")),
    "mlp.gate.weight",
    "mlp.gate.bias",
    "mlp.experts.down_proj_bias",
)
"""Replicated parameters whose gradients come only from the rank's own heads or inner units."""


class SharedParameters(Protocol):
    """The division of a model's parameters among tensor ranks."""

    @property
    def ranks(self) -> int: ...
    @property
    def head_copies(self) -> int: ...
    def box(self, name: str, shape: Index, rank: int) -> Box: ...
    def copies(self, name: str) -> int: ...
    def sums(self, name: str) -> bool: ...
    def head_of(self, rank: int) -> int: ...


@dataclass(frozen=True)
class TensorSplit:
    """The division of a model's parameters among ``ranks`` tensor ranks."""

    config: ModelConfig
    ranks: int
    sequence: bool = False
    """Whether the tokens between the blocks are also split."""

    def box(self, name: str, shape: Index, rank: int) -> Box:
        """Return a rank's part of a parameter of ``shape``."""
        dim = self._dim(name)
        if dim is None:
            return Box.whole(shape)
        first, size = self._range(name, shape[dim], rank)
        start = (*(0,) * dim, first, *(0,) * (len(shape) - dim - 1))
        return Box(start, (*shape[:dim], size, *shape[dim + 1 :]))

    def copies(self, name: str) -> int:
        """Return the number of ranks that have each element."""
        if self._dim(name) is None:
            return self.ranks
        return self.head_copies if self._is_heads(name) else 1

    def sums(self, name: str) -> bool:
        """Return whether the copies' gradients must be summed. Other gradients are equal."""
        if self.ranks == 1 or self.copies(name) == 1:
            return False
        partial = self._is_heads(name) or _in_layer(name) in OF_PARTS
        return self.sequence or partial or adapted_weight(name) is not None

    @property
    def head_copies(self) -> int:
        """Number of ranks that have each key and value head."""
        return max(1, self.ranks // self.config.num_kv_heads)

    def head_of(self, rank: int) -> int:
        """Return the key and value head of a rank if heads are replicated."""
        return rank // self.head_copies

    def _dim(self, name: str) -> int | None:
        if self.ranks == 1:
            return None
        weight = adapted_weight(name)
        if weight is None:
            return 0 if name in (EMBEDDING, LM_HEAD) else SPLIT_DIMS.get(_in_layer(name))
        dim = SPLIT_DIMS.get(_in_layer(weight))
        return dim if dim == (0 if name.endswith(LORA_B) else 1) else None

    def _is_heads(self, name: str) -> bool:
        return _in_layer(name).startswith(KEYS_AND_VALUES)

    def _range(self, name: str, length: int, rank: int) -> tuple[int, int]:
        """Return the first index and the number of a rank's elements along the split dim."""
        if self._is_heads(name) and self.head_copies > 1:
            size = self.config.head_dim
            return self.head_of(rank) * size, size
        each = -(-length // self.ranks)
        first = min(rank * each, length)
        return first, min(each, length - first)


def refusals(config: ModelConfig, tensor_ranks: int) -> Iterator[str]:
    """Yield the reasons why ``tensor_ranks`` cannot share a model."""
    t, heads, kv = tensor_ranks, config.num_heads, config.num_kv_heads
    if t > 1:
        sizes = {"num_attention_heads": heads, "intermediate_size": config.intermediate_size}
        if config.moe is not None:
            sizes["the inner size of the experts"] = config.moe.inner
            if config.moe.shared:
                sizes["the inner size of the shared experts"] = config.moe.shared
            if len(config.moe.layers) == config.num_layers:
                del sizes["intermediate_size"]
        for what, number in sizes.items():
            if number % t:
                yield f"t{t} does not divide {what} {number}"
        if kv % t and t % kv:
            yield f"t{t} neither divides num_key_value_heads {kv} nor is a multiple of it"
        if -(-config.vocab_size // t) * (t - 1) >= config.vocab_size:
            yield f"t{t} leaves a rank without a token of the vocabulary of {config.vocab_size}"


def _in_layer(name: str) -> str:
    """Return a name without ``model.layers.<n>.``."""
    parts = name.split(".", 3)
    return parts[3] if parts[:2] == ["model", "layers"] else name
