"""How completions are sampled and judged."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from slurmrl.config.schema.base import (
    Line,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
    Sequence,
    Word,
)


class Rollout(Section):
    """Generation of completions."""

    backend: Line = ""
    """Engine that generates: `sglang:d4t2`. Default: the actor's own, on its ranks."""
    gpus: Line = ""
    """GPUs of the trainers' job on which it generates. Default: sglang and vllm run in hosts of
    their own, other engines where the actor begins."""
    tensor_parallel_size: PositiveInt | None = None
    """Ranks that share each matrix, instead of or beside the `t` of `backend`."""
    pipeline_parallel_size: PositiveInt | None = None
    """Stages that share the layers, instead of or beside the `p` of `backend`."""
    max_new_tokens: PositiveInt = 256
    """Most tokens of a completion."""
    min_new_tokens: NonNegativeInt = 0
    """Tokens before which a completion cannot end."""
    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling, and in the losses' log-probabilities."""
    top_p: PositiveFraction = 1.0
    """Sample from the smallest set of tokens with at least this probability."""
    top_k: PositiveInt | None = None
    """Sample from this many of the most probable tokens; null takes all."""
    greedy: bool = False
    """Always take the most probable token."""
    stop_token_ids: Sequence[NonNegativeInt] = ()
    """More tokens that end a completion, beside each `eos_token_id` of the actor's
    `generation_config.json` and `config.json` and that of its tokenizer. The log of the run names
    all of them. The reward does not see the token that ended a completion."""

    @model_validator(mode="after")
    def _lengths(self) -> Rollout:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}"
            )
        return self


class Reward(Section):
    """The rule that judges completions."""

    name: Word
    """Kind of reward: `exact_match`, `math`, … or a `package.module:name` of your own, a function
    or a class (docs/rewards.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of that kind."""
