"""What the critic and the reference take from the actor where they do not say it themselves."""

from __future__ import annotations

from typing import Any, Final

from slurmrl.config.schema import Config, Model
from slurmrl.plan.algorithms import Algorithm

DEFAULT_BACKEND: Final = "fsdp:d1"
INHERITED: Final = ("dtype", "gradient_checkpointing", "max_tokens_per_microbatch")


def complete(config: Config, algorithm: Algorithm) -> Config:
    """The configuration with a whole section for every role that the algorithm uses."""
    actor = config.actor.model_copy(
        update={
            "backend": config.actor.backend or DEFAULT_BACKEND,
            "tokenizer": config.actor.tokenizer or config.actor.path,
        }
    )
    roles = {use.role: _from_actor(getattr(config, use.role), actor) for use in algorithm.roles()}
    return config.model_copy(update={**roles, "actor": actor})


def _from_actor(model: Model | None, actor: Model) -> Model:
    model = model or Model()
    update: dict[str, Any] = {
        name: getattr(actor, name) for name in INHERITED if name not in model.model_fields_set
    }
    update["backend"] = model.backend or actor.backend
    update["tokenizer"] = model.tokenizer or actor.tokenizer
    if model.path is None and model.architecture is None:
        update |= {"path": actor.path, "architecture": actor.architecture}
    return model.model_copy(update=update)
