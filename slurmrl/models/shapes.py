"""Names and shapes of a model's parameters, and their storage in files. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from slurmrl.models import hf_form
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.family_rules import Latent
from slurmrl.models.hf_config import HFConfig
from slurmrl.registry import resolve
from slurmrl.tensors.checkpoint.tensors import Storage, TensorEntry, TensorSlice
from slurmrl.tensors.layout import Array, Box, Index, TensorSpec

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
Shapes = dict[str, tuple[int, ...]]
LAYERS = "model.layers."
MTP_FIELDS: Final = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names that a config may have for the number of its MTP layers."""
MTP_TENSOR: Final = re.compile(r"(?:(?:model|language_model)\.)*(?:mtp\.|layers\.(\d+)\.)")


def parameter_shapes(config: ModelConfig, head: Head) -> Shapes:
    """Return a mapping from every parameter to its shape, in the decoder's order.

    A tied vocabulary projection has no entry, because it is the embedding.
    """
    hidden = config.hidden_size
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden)}
    if config.rope is None:
        shapes[POSITIONS] = (config.max_positions, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    _norm(shapes, "model.norm", config)
    if head == "value":
        shapes[VALUE_HEAD] = (1, hidden)
    elif not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


CORRECTION = "mlp.gate.e_score_correction_bias"


def constant_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return a mapping from each tensor that no optimizer step changes to its spec.

    These tensors are float32 in every model, because rounding would change the choice of experts.
    """
    moe = config.moe
    if moe is None or not moe.corrected:
        return {}
    spec = TensorSpec((moe.experts,), "float32")
    return {f"{LAYERS}{layer}.{CORRECTION}": spec for layer in sorted(moe.layers)}


def stored_shapes(config: ModelConfig, head: Head) -> Shapes:
    """Return a mapping from every parameter and constant to its shape."""
    constants = constant_specs(config)
    return parameter_shapes(config, head) | {n: tuple(s.shape) for n, s in constants.items()}


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {}
    if config.family.sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    if config.latent is not None:
        q = config.num_heads * config.latent.value
        _latent_shapes(shapes, config, config.latent)
    else:
        _linear(shapes, "self_attn.q_proj", q, hidden, config.qkv_bias)
        _linear(shapes, "self_attn.k_proj", kv, hidden, config.qkv_bias)
        _linear(shapes, "self_attn.v_proj", kv, hidden, config.qkv_bias)
    _linear(shapes, "self_attn.o_proj", hidden, q, config.o_bias)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if config.moe and layer in config.moe.layers:
        experts, inner = config.moe.experts, config.moe.inner
        _linear(shapes, "mlp.gate", experts, hidden, config.moe.clamp is not None)
        if config.moe.clamp is not None:
            shapes["mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes["mlp.experts.gate_up_proj_bias"] = (experts, 2 * inner)
            shapes["mlp.experts.down_proj"] = (experts, hidden, inner)
            shapes["mlp.experts.down_proj_bias"] = (experts, hidden)
        else:
            shapes["mlp.experts.gate_proj"] = (experts, inner, hidden)
            shapes["mlp.experts.up_proj"] = (experts, inner, hidden)
            shapes["mlp.experts.down_proj"] = (experts, hidden, inner)
        if shared := config.moe.shared:
            _linear(shapes, "mlp.shared_experts.gate_proj", shared, hidden, config.mlp_bias)
            _linear(shapes, "mlp.shared_experts.up_proj", shared, hidden, config.mlp_bias)
            _linear(shapes, "mlp.shared_experts.down_proj", hidden, shared, config.mlp_bias)
    else:
        inner = config.intermediate_size
        if config.family.gated:
            _linear(shapes, "mlp.gate_proj", inner, hidden, config.mlp_bias)
        _linear(shapes, "mlp.up_proj", inner, hidden, config.mlp_bias)
        _linear(shapes, "mlp.down_proj", hidden, inner, config.mlp_bias)
    _norm(shapes, "input_layernorm", config)
    _norm(shapes, "post_attention_layernorm", config)
    return shapes


def _latent_shapes(shapes: Shapes, config: ModelConfig, latent: Latent) -> None:
    heads, hidden, queries = config.num_heads, config.hidden_size, latent.query_rank
    if queries is None:
        _linear(shapes, "self_attn.q_proj", heads * latent.key, hidden, False)
    else:
        _linear(shapes, "self_attn.q_a_proj", queries, hidden, config.qkv_bias)
        shapes["self_attn.q_a_layernorm.weight"] = (queries,)
        _linear(shapes, "self_attn.q_b_proj", heads * latent.key, queries, False)
    both = latent.rank + latent.rotated
    _linear(shapes, "self_attn.kv_a_proj_with_mqa", both, hidden, config.qkv_bias)
    shapes["self_attn.kv_a_layernorm.weight"] = (latent.rank,)
    expanded = heads * (latent.plain + latent.value)
    _linear(shapes, "self_attn.kv_b_proj", expanded, latent.rank, False)


def _linear(shapes: Shapes, name: str, outputs: int, inputs: int, bias: bool) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: Shapes, name: str, config: ModelConfig) -> None:
    shapes[f"{name}.weight"] = (config.hidden_size,)
    if config.family.norm_bias:
        shapes[f"{name}.bias"] = (config.hidden_size,)


def storage_of(config: ModelConfig | HFConfig) -> Storage:
    """Return the function that maps a model's parameters to slices of the files' tensors."""
    if isinstance(config, HFConfig):
        return hf_form.file_form(config, "lm").storage
    return partial(resolve(config.family.files), config)


def embedding_tensor(config: ModelConfig | HFConfig) -> str:
    """Return the name of the token embedding in files."""
    if isinstance(config, HFConfig):
        return config.embedding
    shape = (config.vocab_size, config.hidden_size)
    return storage_of(config)(EMBEDDING, shape)[0].tensor


def file_form(
    values: Mapping[str, Any], implementation: Literal["builtin", "hf"], head: Head
) -> tuple[dict[str, Any], Storage]:
    """Return the ``config.json`` of files for a model of ``values``, and the storage of parameters.

    Raises UsageError for a model of transformers that cannot be built or written.
    """
    if implementation == "hf":
        form = hf_form.file_form(HFConfig.from_hf(values), head)
        return {
            **HFConfig.from_hf(form.values).to_hf(head=head),
            "architectures": [form.architecture],
        }, form.storage
    config = ModelConfig.from_hf(values)
    return config.to_hf(head=head), storage_of(config)


def by_name(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Return the whole tensor with the name of the parameter."""
    return (TensorSlice(name),)


def experts(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Return the slices of a parameter in files with one tensor per expert."""
    names = config.family.experts
    assert names is not None
    prefix, separator, matrix = name.partition(".mlp.experts.")
    block = f".{names.block}."
    if not separator:
        return (TensorSlice(name.replace(".mlp.gate.", f"{block}gate.")),)
    theirs = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}[matrix]
    return tuple(
        TensorSlice(
            f"{prefix}{block}experts.{row}.{theirs}.weight",
            part=Box((row, 0, 0), (1, *shape[1:])),
            dims=(1, 2),
        )
        for row in range(shape[0])
    )


def fused_experts(config: ModelConfig, name: str, shape: Index) -> tuple[TensorSlice, ...]:
    """Return the slice of a parameter in files with the transposed matrices of all experts."""
    if ".mlp.experts." in name:
        return (TensorSlice(name, dims=(0, 2, 1) if len(shape) == 3 else None),)
    return (TensorSlice(name.replace(".mlp.gate.", ".mlp.router.")),)


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
    """Return the slice of a parameter. GPT-2 transposes matrices, and joins q, k and v."""
    if not name.startswith(LAYERS):
        return (TensorSlice(GPT2_NAMES.get(name, name)),)
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    module, _, kind = rest.rpartition(".")
    place = GPT2_FUSED.index(module) if module in GPT2_FUSED else 0
    return (
        TensorSlice(
            f"transformer.h.{layer}.{GPT2_LAYER_NAMES[module]}.{kind}",
            dims=(1, 0) if len(shape) > 1 else None,
            start=(*(0 for _ in shape[1:]), place * config.hidden_size),
        ),
    )


class FolderTensors(Protocol):
    """The tensors of a model folder."""

    folder: Path

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the specs of the tensors by their names in the files."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a tensor; bfloat16 as its bits (uint16)."""
        ...

    def file(self, name: str) -> Path:
        """Return the file with a tensor, or the folder if several files have parts of it."""
        ...


class TrainedTensors(Protocol):
    """Trained tensors of a checkpoint or of a weight version."""

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Yield names and specs of the tensors."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a tensor."""
        ...


def states_mtp(config: Mapping[str, Any]) -> bool:
    """Return whether a config states that its model has multi-token prediction (MTP) layers."""
    text = {**config, **config.get("text_config", {})}
    return any(text.get(name) for name in MTP_FIELDS)


def mtp_entries(tensors: FolderTensors, config: Mapping[str, Any]) -> list[TensorEntry]:
    """Return the tensors of a folder's MTP layers, which predict tokens after the next token.

    No engine computes these layers. The names of their tensors begin with ``mtp``. If the
    ``config`` states that it has MTP layers, they may also follow the config's last layer.
    """
    layers = {**config, **config.get("text_config", {})}.get("num_hidden_layers", 0)
    found = []
    for name, spec in tensors.specs().items():
        match = MTP_TENSOR.match(name)
        if match and (match[1] is None or (states_mtp(config) and int(match[1]) >= layers)):
            read = partial(tensors.read, name, Box.whole(spec.shape))
            found.append(TensorEntry(name, spec, read))
    return found
