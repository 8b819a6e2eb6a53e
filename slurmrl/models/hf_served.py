"""What a server needs to load a model of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slurmrl.errors import UsageError
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_loading import make_model


def complete(config: HFConfig) -> HFConfig:
    """Return a config for servers, which need the class and the size of the vocabulary.

    Raises UsageError if transformers does not know the family, runs only its text part, or holds
    its tensors in another form than the family's files, which servers read.
    """
    try:
        with torch.device("meta"):
            model = make_model(config, "lm", None, 0, torch.float32)
        reason = _other_form(model, config)
        found = {} if reason else _served_values(model)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers' classes may raise anything
        reason, found = f"{type(error).__name__}: {error}", {}
    if reason:
        raise UsageError(
            f"servers cannot load {config.model_type} models from implementation hf: {reason}; "
            "leave out rollout.backend, so that the trainers generate"
        )
    embedding = found.pop("embedding")
    return replace(config, values={**config.values, **found}, embedding=embedding)


def _other_form(model: PreTrainedModel, config: HFConfig) -> str:
    """Return why the family's files have another form than the model; empty if they do not."""
    made = model.config.model_type
    if made != config.model_type:
        return f"transformers runs only their text part ({made})"
    state = dict(model.state_dict())
    filed = revert_weight_conversion(model, dict(state))
    other = {name for name, values in state.items() if filed.get(name) is not values}
    if not other:
        return ""
    return f"transformers holds {min(other)} in another form than the files of the family"


def _served_values(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fields that servers need, and ``embedding``, the embedding's name in files."""
    inner: Any = model
    table = inner.get_input_embeddings().weight
    (embedding,) = (name for name, each in model.named_parameters() if each is table)
    return {
        "architectures": [type(model).__name__],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": inner.get_output_embeddings().weight is table,
        "embedding": embedding,
    }
