"""Latent attention in megatron's layers (see `models.latent_attention`).

megatron-core's own module computes rotations from other settings than `models.layer_parts`, and
supports neither slurmrl's packing nor its ring attention. This module calls the same attention as
all other layers.

T is the number of packed tokens, c the number of context-parallel ranks, h the hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from slurmrl.models.architecture import ModelConfig
from slurmrl.models.latent_attention import NORM_EPS, heads_of
from slurmrl.tensors.ops.collectives import own_to_partial, whole_to_partial


class LatentVectors(nn.Module):
    """The product for latent vectors. Each tensor rank computes it with the whole matrix."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        values = torch.empty(size, config.hidden_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(values)
        # With sequence parallelism, each rank has only its own tokens, so gradients are summed.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentSelfAttention(nn.Module):
    """Queries, keys and values from latent vectors; heads are split over the tensor ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        model: ModelConfig,
        core: Callable[..., nn.Module],
        column: type,
        row: type,
        norm: ModuleSpec,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        assert model.latent is not None
        latent = self.latent = model.latent
        self.config, self.group = config, pg_collection.tp

        def split(kind: type, inputs: int, outputs: int, name: str, **options: Any) -> Any:
            return build_module(
                kind,
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=name,
                tp_group=self.group,
                **options,
            )

        def norm_of(size: int) -> Any:
            return build_module(norm, config=config, hidden_size=size, eps=NORM_EPS)

        by_heads, heads = {"gather_output": False}, config.num_attention_heads
        queries = config.hidden_size if latent.query_rank is None else latent.query_rank
        if latent.query_rank is not None:
            self.q_down, self.q_norm = LatentVectors(config, queries), norm_of(queries)
        self.q_up = split(column, queries, heads * latent.key, "q_up_proj", **by_heads)
        self.kv_down = LatentVectors(config, latent.rank + latent.rotated)
        self.kv_norm = norm_of(latent.rank)
        expanded = heads * (latent.plain + latent.value)
        self.kv_up = split(column, latent.rank, expanded, "kv_up_proj", **by_heads)
        self.core_attention = core(config, layer_number, pg_collection=pg_collection)
        values = heads * latent.value
        self.linear_proj = split(row, values, config.hidden_size, "proj", input_is_parallel=True)

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Return outputs [T/c, 1, h] for hidden states [T/c, 1, h], and None for the bias.

        With sequence parallelism, all states have only this tensor rank's part of the tokens.
        """
        latent = self.latent
        x = hidden_states if latent.query_rank is None else self.q_norm(self.q_down(hidden_states))
        queries, _bias = self.q_up(x)
        both = self.kv_down(hidden_states)
        vectors, turned = both.split_with_sizes((latent.rank, latent.rotated), -1)
        expanded, _bias = self.kv_up(self.kv_norm(vectors))
        if self.group.size() > 1:
            gather = own_to_partial if self.config.sequence_parallel else whole_to_partial
            turned = gather(turned, self.group)
        q, k, v = heads_of(latent, *(x.squeeze(1) for x in (queries, expanded, turned)))
        out = self.core_attention(q, k, v, packed_seq_params=packed_seq_params)
        mixed, _bias = self.linear_proj(out[..., : latent.value].flatten(1).unsqueeze(1))
        return mixed, None
