"""How the families' parameters are stored in Hugging Face's files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig, stored
from slurmrl.models.shapes import EMBEDDING, POSITIONS
from slurmrl.registry import resolve
from slurmrl.tensors.checkpoint.stored import Storage, TensorSlice
from slurmrl.tensors.layout.box import Index

LAYERS = "model.layers."


def storage_of(config: ModelConfig) -> Storage:
    """Where each parameter of a config's decoder is stored."""
    return partial(resolve(config.family.files), config)


def file_form(
    values: Mapping[str, Any], implementation: Literal["builtin", "hf"], head: Head
) -> tuple[dict[str, Any], Storage]:
    """The ``config.json`` to write for a model that was built from ``values``, and the mapping of
    its parameters to tensors of the files."""
    if implementation == "hf":
        return HFConfig.from_hf(values).to_hf(head=head), stored
    config = ModelConfig.from_hf(values)
    return config.to_hf(head=head), storage_of(config)


def by_name(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Each parameter is the tensor of the same name."""
    return (TensorSlice(name),)


def experts(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Files have one tensor per expert, with the family's names."""
    names = config.family.experts
    assert names is not None
    prefix, separator, matrix = name.partition(".mlp.experts.")
    block = f".{names.block}."
    if not separator:
        return (TensorSlice(name.replace(".mlp.gate.", f"{block}gate.")),)
    theirs = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}[matrix]
    return tuple(
        TensorSlice(f"{prefix}{block}experts.{row}.{theirs}.weight", row) for row in range(shape[0])
    )


GPT2_NAMES = {
    EMBEDDING: "transformer.wte.weight",
    POSITIONS: "transformer.wpe.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "model.norm.bias": "transformer.ln_f.bias",
}
GPT2_LAYER_NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
GPT2_FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def gpt2(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Matrices are transposed; queries, keys and values are concatenated."""
    if not name.startswith(LAYERS):
        return (TensorSlice(GPT2_NAMES.get(name, name)),)
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    module, _, kind = rest.rpartition(".")
    place = GPT2_FUSED.index(module) if module in GPT2_FUSED else 0
    return (
        TensorSlice(
            f"transformer.h.{layer}.{GPT2_LAYER_NAMES[module]}.{kind}",
            transposed=len(shape) > 1,
            first=place * config.hidden_size,
        ),
    )
