"""The packed decoder, and GPT-2: learned positions, LayerNorm, a feed-forward part without a gate.

Parameters have the names of the Hugging Face safetensors files, except for parameters that
`Storage` renames.

Shapes: T packed tokens, h hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.base import PackedModel
from slurmrl.models.experts import Balance, Recorded, Replayed, SparseMLP
from slurmrl.models.latent_attention import LatentAttention
from slurmrl.models.layer_parts import (
    Attention,
    AttentionCore,
    GatedMLP,
    PackedCore,
    Pieces,
    PlainMLP,
    RingCore,
    RMSNorm,
    RotaryTable,
    Rotation,
    arranged,
    split_core,
)
from slurmrl.models.packed import inverse, packed_positions
from slurmrl.models.parallel.linear import (
    Adapter,
    LogProbs,
    VocabEmbedding,
    VocabProjection,
    split_logprobs,
    split_values,
)
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.models.recompute import (
    LayerCall,
    Recompute,
    keeping_products,
    layer_call,
    recomputed,
    unhooked,
)
from slurmrl.registry import resolve
from slurmrl.tensors.ops.arguments import OnHost, upload
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.logprobs import packed_logprobs_and_entropy
from slurmrl.tensors.ops.products import wide_linear
from slurmrl.tensors.ops.sampling import SamplingMasks


class ResidualLayer(nn.Module):
    """Attention and a feed-forward block, each after a norm and with a residual connection."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    recompute: Recompute = "off"

    def forward(self, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
        """Return the layer's output [T, h] for ``x`` [T, h]."""
        if self.recompute != "selective" or not torch.is_grad_enabled():
            return self._feed_forward(self._attend(x, rotation, core))
        middle = keeping_products(self._attend, x, rotation, core)
        out: Tensor = recomputed(self._feed_forward, middle)
        return out

    def _attend(self, x: Tensor, rotation: Rotation | None, core: AttentionCore) -> Tensor:
        out: Tensor = x + self.self_attn(self.input_layernorm(x), rotation, core)
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderLayer(ResidualLayer):
    """A layer with root-mean-square norms and a gated or sparse feed-forward block."""

    def __init__(self, config: ModelConfig, layer: int, split: Split = WHOLE) -> None:
        super().__init__()
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, layer, split=split)
        sparse = config.moe is not None and layer in config.moe.layers
        self.mlp = SparseMLP(config, split) if sparse else GatedMLP(config, split)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)


class DecoderBody(nn.Module):
    """Embedding, layers and final norm, which files name ``model``."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, split)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, i, split) for i in layers)
        self.norm = _norm(config)


class Body(Protocol):
    """The attributes of every family's body."""

    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module


class Decoder(PackedModel):
    """A decoder with rotary positions. Families with a different structure have subclasses.

    With a ``split``, its parameters are this rank's parts, and all ranks of the split call each
    method together with the same arguments.
    """

    config: ModelConfig
    body: type[nn.Module] = DecoderBody
    adapters: Adapter | None = None
    """Adapters of the linear layers; None if there are none."""

    def __init__(self, config: ModelConfig, head: Head = "lm", split: Split = WHOLE) -> None:
        super().__init__()
        self.config = config
        self.split = split
        self.head = head
        self.recompute: Recompute = "off"
        self.model = self.body(config, split)
        if head == "value":
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif not config.tie_embeddings:
            self.lm_head = VocabProjection(config.hidden_size, config.vocab_size, split)
        self._embedding_scale = config.hidden_size**0.5 if config.family.scaled_embedding else None
        self._rotary = RotaryTable(config.rope, config.rotary_dims) if config.rope else None
        self.balance = self._balance()
        self._replayed: Replayed | None = None
        for number, block in enumerate(self._sparse_blocks):
            block.number = number

    def constants(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())

    @property
    def layers(self) -> Iterable[nn.Module]:
        return self._body.layers

    @property
    def embedding(self) -> nn.Module | None:
        tied = self.head == "lm" and self.config.tie_embeddings
        return None if tied else self._body.embed_tokens

    @property
    def projection(self) -> nn.Module | None:
        return getattr(self, "lm_head", None)

    @property
    def _body(self) -> Body:
        return cast(Body, self.model)

    def use(self, recompute: Recompute) -> None:
        self.recompute = recompute
        for module in self.modules():
            if isinstance(module, ResidualLayer):
                module.recompute = recompute
            if isinstance(module, GatedMLP):
                module.recomputed = recompute != "off"

    @contextmanager
    def routed(self, routes: Recorded | Replayed | None) -> Iterator[None]:
        """Make the blocks with experts follow ``routes`` in this context and in backward passes."""
        self._replayed = routes if isinstance(routes, Replayed) else None
        for block in self._sparse_blocks:
            block.routes = routes
        try:
            yield
        finally:
            self._replayed = None
            for block in self._sparse_blocks:
                block.routes = None

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor | OnHost | Pieces, max_len: int
    ) -> Tensor:
        """Return hidden states [T, h] after the final norm.

        With a split, return this rank's part of the states in an internal order, which ``logprobs``
        and ``values`` expect. On a CPU without a split, ``cu_seqlens`` may be `Pieces` of sequences
        of up to ``max_len`` tokens.
        """
        self.config.check_length(max_len)
        core: AttentionCore
        if isinstance(cu_seqlens, Pieces):
            order, back, positions, core = arranged(cu_seqlens, max_len)
        else:
            if isinstance(cu_seqlens, OnHost):
                cu_seqlens = cu_seqlens.tensor
            # Attention needs fewer calls if sequences of equal length are adjacent.
            order, places, cu_sorted = self.split.packed(cu_seqlens, input_ids.shape[0])
            positions = packed_positions(cu_sorted, input_ids.shape[0])[places]
            back = inverse(order)
            if self.split.ring:
                core = RingCore(cu_sorted.tolist(), self.split)
            else:
                core = PackedCore(Packing(cu_sorted, max_len))
        order, back, positions = upload((order, back, positions), input_ids.device)
        if self.adapters is not None:
            self.adapters.arrange(order, self.split)
        if self._replayed is not None:
            self._replayed.arrange(order, self.split)
        call = layer_call(self.recompute)
        hidden = self._run(input_ids[order], positions, core, call, self.split)
        return hidden.index_select(0, back) if self.split.whole else hidden

    def run_unhooked(self, input_ids: Tensor, positions: Tensor, core: AttentionCore) -> Tensor:
        """Return the hidden states [T, h] of tokens [T] at positions [T].

        Call the layers' ``forward`` without hooks. All context ranks compute all tokens.
        """
        split = self.split.without_context()
        hidden = self._run(input_ids, positions, core, unhooked, split)
        return split.together(hidden)[: input_ids.shape[0]]

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        core: AttentionCore,
        call: LayerCall,
        split: Split,
    ) -> Tensor:
        """Return the hidden states of the tokens that this rank has between the blocks."""
        core = split_core(core, split, input_ids.shape[0])
        first, last = split.own_range(input_ids.shape[0])
        for block in self._sparse_blocks:
            block.tokens = last - first
        input_ids, positions = split.own_tokens(input_ids), split.own_tokens(positions)
        embedding = self._body.embed_tokens
        tokens = embedding.forward(input_ids) if call is unhooked else embedding(input_ids)
        x = self.embed(tokens, positions)
        rotation = self.rotation(positions, x.dtype)
        for layer in self.layers:
            x = call(layer, x, rotation, core)
        out: Tensor = self._body.norm(x)
        return out

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the layers' input [T, h] from embeddings of tokens [T, h] at positions [T]."""
        if self._embedding_scale is None:
            return tokens
        # The scale is rounded to the model's dtype, as in transformers.
        return tokens * torch.tensor(self._embedding_scale, dtype=tokens.dtype, device="cpu").item()

    @property
    def token_embedding(self) -> nn.Embedding:
        return self._body.embed_tokens

    @property
    def final_norm(self) -> nn.Module:
        return self._body.norm

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        """Return the angles of positions [T]; None if positions are learned embeddings."""
        return self._rotary.rotation(positions, dtype) if self._rotary else None

    def head_weight(self) -> Tensor:
        """Return the vocabulary projection [V, h], which may be the embedding."""
        assert self.head == "lm", "a value model has no vocabulary projection"
        tied = self.config.tie_embeddings
        return self._body.embed_tokens.weight if tied else self.lm_head.weight

    def logprobs(
        self,
        features: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        masks: SamplingMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        def use(features: Tensor, weight: Tensor) -> LogProbs:
            batch = (input_ids, cu_seqlens, temperature)
            if self.split.whole:
                return packed_logprobs_and_entropy(features, weight, *batch, masks=masks)
            vocabulary = self.config.vocab_size
            return split_logprobs(self.split, features, weight, vocabulary, *batch, masks)

        if self.projection is None:
            return use(features, self.head_weight())
        both: LogProbs = self.projection(features, use)
        return both

    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        assert self.head == "value", "a language model has no value head"
        weight = self.score.weight  # float32 even in bfloat16 models
        values = wide_linear(features.to(weight.dtype), weight).squeeze(-1)
        if self.split.whole:
            return values
        assert cu_seqlens is not None, "a split model needs cu_seqlens"
        return split_values(self.split, values, cu_seqlens)

    def _balance(self) -> Balance | None:
        """Return the load-balancing loss of all blocks with experts; None if there is none.

        The loss's weight is divided by the number of tensor ranks, because these have the same
        tokens and sum their gradients of the router.
        """
        blocks, moe = self._sparse_blocks, self.config.moe
        if moe is None or not moe.balance or not blocks:
            return None
        weight = moe.balance / len(blocks) / self.split.tensor.size
        balance = Balance(moe.experts, moe.per_token, weight)
        for block in blocks:
            block.balance = balance
            balance.join()
        return balance

    @cached_property
    def _sparse_blocks(self) -> list[SparseMLP]:
        return [module for module in self.modules() if isinstance(module, SparseMLP)]


class GPT2Layer(ResidualLayer):
    """A layer with LayerNorms and a feed-forward block without a gate."""

    def __init__(self, config: ModelConfig, layer: int, split: Split = WHOLE) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, _gpt2_scale(config, layer), split)
        self.mlp = PlainMLP(config, split)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps)


class GPT2Body(nn.Module):
    """Embeddings of tokens and positions, layers and final norm."""

    def __init__(self, config: ModelConfig, split: Split = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, split)
        self.embed_positions = nn.Embedding(config.max_positions, config.hidden_size)
        layers = range(config.num_layers)
        self.layers = nn.ModuleList(GPT2Layer(config, i, split) for i in layers)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)


class GPT2(Decoder):
    """The decoder of GPT-2 (Radford et al. 2019), with learned positions."""

    body = GPT2Body

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        body = cast(GPT2Body, self.model)
        places: Tensor = body.embed_positions(self.split.between(positions))
        return tokens + places


def _gpt2_scale(config: ModelConfig, layer: int) -> float:
    scale = config.head_dim**-0.5 if config.extra["scale_attn_weights"] else 1.0
    return scale / (layer + 1) if config.extra["scale_attn_by_inverse_layer_idx"] else scale


def build(config: ModelConfig, head: Head = "lm", split: Split = WHOLE) -> Decoder:
    """Build the decoder of the config's family, or this rank's part of it.

    May be called under ``torch.device("meta")``.
    """
    decoder: Decoder = resolve(config.family.decoder)(config, head, split)
    return decoder


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, offset=config.family.norm_offset)
