"""GPT-2: learned positions, LayerNorm, a feed-forward part without a gate.

Its files hold fused and transposed weights, which ``storage.py`` maps to the same parameters as in
other families.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from slurmrl.models.attention import Attention
from slurmrl.models.config import ModelConfig
from slurmrl.models.decoder import Decoder, ResidualLayer
from slurmrl.models.feed_forward import PlainMLP
from slurmrl.models.parallel.linear import VocabEmbedding
from slurmrl.models.parallel.split import WHOLE, Split


class GPT2Layer(ResidualLayer):
    """A layer with LayerNorms and a feed-forward block without a gate."""

    def __init__(self, config: ModelConfig, layer: int, split: Split = WHOLE) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, _scale(config, layer), split)
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
    """Radford et al. 2019."""

    body = GPT2Body

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        body = cast(GPT2Body, self.model)
        places: Tensor = body.embed_positions(self.split.between(positions))
        return tokens + places


def _scale(config: ModelConfig, layer: int) -> float:
    scale = config.head_dim**-0.5 if config.extra["scale_attn_weights"] else 1.0
    return scale / (layer + 1) if config.extra["scale_attn_by_inverse_layer_idx"] else scale
