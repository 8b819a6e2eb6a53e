"""The architectures that the megatron engine runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig

INSTALL_HINT = "pip install 'slurmrl[megatron]'"


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
            "megatron-core has biases in all matrices or in those of queries, keys and values, "
            "not in some others"
        )
    if moe and config.o_bias:
        problems.append("megatron-core has no experts with biases elsewhere")
    if moe and moe.normalized and moe.per_token == 1:
        problems.append("with one expert per token, always of weight 1, the router has no gradient")
    if problems:
        raise UsageError(
            f"the megatron engine does not run this {config.model_type} model: "
            + "; ".join(problems)
        )
