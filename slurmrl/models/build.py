"""The model that a config asks for."""

from __future__ import annotations

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.registry import resolve


def build(config: ModelConfig, head: Head = "lm") -> Decoder:
    """A built-in decoder. May be called under ``torch.device("meta")``."""
    decoder: Decoder = resolve(config.family.decoder)(config, head)
    return decoder
