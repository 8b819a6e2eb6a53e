"""Construction of a built-in decoder from its config."""

from __future__ import annotations

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.models.parallel.split import WHOLE, Split
from slurmrl.registry import resolve


def build(config: ModelConfig, head: Head = "lm", split: Split = WHOLE) -> Decoder:
    """Build a decoder, or this rank's part of one. May be called under
    ``torch.device("meta")``."""
    decoder: Decoder = resolve(config.family.decoder)(config, head, split)
    return decoder
