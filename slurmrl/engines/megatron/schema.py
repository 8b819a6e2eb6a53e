"""The architectures that the megatron engine runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig


class MegatronModel:
    """The reader of architectures for the plan."""

    @staticmethod
    def from_hf(values: Mapping[str, Any], *, strict: bool = False) -> ModelConfig:
        """Read a ``config.json`` object. Raises UsageError for parts that the engine
        does not run."""
        config = ModelConfig.from_hf(values, strict=strict)
        check(config)
        return config


def check(config: ModelConfig) -> None:
    """Raises UsageError where megatron-core has no modules for an architecture."""
    problems = []
    family, moe = config.family, config.moe
    if family.norm_bias or not family.gated or config.rope is None:
        problems.append(
            "the engine needs rotary positions, gated feed-forward blocks and RMS norms"
        )
    elif config.o_bias != config.mlp_bias or (config.o_bias and not config.qkv_bias):
        problems.append(
            "megatron-core supports biases in all matrices, or only in those of queries, keys and "
            "values"
        )
    if moe and config.o_bias:
        problems.append("megatron-core does not support experts in a model with attention_bias")
    if moe and moe.normalized and moe.per_token == 1:
        problems.append(
            "num_experts_per_tok 1 with norm_topk_prob gives every expert the weight 1, so the "
            "router would get no gradient"
        )
    if problems:
        raise UsageError(
            f"the megatron engine does not run this {config.model_type} model: "
            + "; ".join(problems)
        )
