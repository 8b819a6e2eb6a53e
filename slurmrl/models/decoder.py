"""The packed decoder. Parameters carry exactly the names of the Hugging Face safetensors files.

T packed tokens, S sequences, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slurmrl.models.attention import Attention, AttentionCore, PackedCore
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.mlp import GatedMLP
from slurmrl.models.norm import RMSNorm
from slurmrl.models.rotary import RotaryTable, Rotation
from slurmrl.ops.attention import Packing

_LayerCall = Callable[[nn.Module, Tensor, Rotation, AttentionCore], Tensor]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, core: AttentionCore) -> Tensor:
        """x [T, h] -> [T, h]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, core)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderBody(nn.Module):
    """Embedding, layers and final norm: what the files call ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A decoder with a language-model or a value head.

    May be built under ``torch.device("meta")``; parameters are the only state.
    """

    def __init__(self, config: ModelConfig, head: Head = "lm") -> None:
        super().__init__()
        self.config = config
        self.head: Head = head
        self.gradient_checkpointing = False
        """Recompute each layer in the backward pass instead of keeping what is inside it."""
        self.model = DecoderBody(config)
        if head == "value":
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotary = RotaryTable(config.rope, config.head_dim)

    @property
    def layers(self) -> nn.ModuleList:
        """The modules to wrap one by one (sharding, checkpointing)."""
        return self.model.layers

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
        """input_ids [T], cu_seqlens [S+1] int32, longest sequence -> hidden [T, h] after the
        final norm."""
        # Equal lengths side by side let attention run in few batched calls.
        order, cu_sorted = length_order(cu_seqlens, input_ids.shape[0])
        positions = packed_positions(cu_sorted, input_ids.shape[0])
        core = PackedCore(Packing(cu_sorted, max_len))
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        call = _recomputed if recompute else _called
        hidden = self._run(input_ids[order], positions, core, call)
        return hidden.index_select(0, order.argsort())

    def run_unhooked(self, input_ids: Tensor, positions: Tensor, core: AttentionCore) -> Tensor:
        """Hidden states [T, h] of tokens [T] at positions [T], by plain calls of the layers'
        ``forward``.

        For generation: a sharded engine gathers all parameters once, and its hooks on a layer
        would give them back after each step.
        """
        return self._run(input_ids, positions, core, _unhooked)

    def _run(
        self, input_ids: Tensor, positions: Tensor, core: AttentionCore, call: _LayerCall
    ) -> Tensor:
        x: Tensor = self.model.embed_tokens(input_ids)
        rotation = self._rotary.rotation(positions, x.dtype)
        for layer in self.model.layers:
            x = call(layer, x, rotation, core)
        out: Tensor = self.model.norm(x)
        return out

    def head_weight(self) -> Tensor:
        """The vocabulary projection [V, h]; the embedding itself where they are tied."""
        assert self.head == "lm", "a value model has no vocabulary projection"
        if self.config.tie_embeddings:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def values(self, hidden: Tensor) -> Tensor:
        """Values [T] float32 of hidden states [T, h]."""
        assert self.head == "value", "a language model has no value head"
        return F.linear(hidden, self.score.weight).squeeze(-1).float()


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position of each packed token within its sequence [T] int64."""
    starts = cu_seqlens[:-1].long()
    spread = torch.repeat_interleave(starts, cu_seqlens.diff().long(), output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) - spread


def length_order(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Token order [T] that puts sequences of equal length side by side, and the cu_seqlens of
    that order."""
    lengths = cu_seqlens.diff().long()
    by_length = lengths.argsort(stable=True)
    sorted_lengths = lengths[by_length]
    cu_sorted = torch.zeros_like(cu_seqlens)
    cu_sorted[1:] = sorted_lengths.cumsum(0)
    first = cu_seqlens[:-1].long()[by_length] - cu_sorted[:-1].long()
    offsets = torch.repeat_interleave(first, sorted_lengths, output_size=tokens)
    return torch.arange(tokens, device=cu_seqlens.device) + offsets, cu_sorted


def _called(layer: nn.Module, x: Tensor, rotation: Rotation, core: AttentionCore) -> Tensor:
    out: Tensor = layer(x, rotation, core)
    return out


def _recomputed(layer: nn.Module, x: Tensor, rotation: Rotation, core: AttentionCore) -> Tensor:
    out: Tensor = checkpoint(layer, x, rotation, core, use_reentrant=False)
    return out


def _unhooked(layer: nn.Module, x: Tensor, rotation: Rotation, core: AttentionCore) -> Tensor:
    out: Tensor = layer.forward(x, rotation, core)
    return out
