"""What a model of transformers does between its hidden states and its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FACTOR = 2.0**10
"""Products are so much larger when they are tried: what caps them shows, and no rounding does."""


@torch.no_grad()
def only_multiplies(model: Any) -> bool:
    """Whether the logits of a ``PreTrainedModel`` on the CPU are the last hidden states of its body
    times the weight of its output projection, and nothing else: no bias, no cap, no scale. Tried on
    a few tokens, for a config does not tell; False where it cannot be tried."""
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or head.bias is not None or body is model:
        return False
    ids = torch.arange(min(4, head.out_features))[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    read: list[Tensor] = []

    def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        read.append(inputs[0])
        return output * FACTOR

    handle = head.register_forward_hook(amplify)
    try:
        states, logits = body(**given).last_hidden_state, model(**given).logits
    except Exception:  # noqa: BLE001 - of the model, not ours
        return False  # it runs on GPUs alone, or its body is called in a way of its own
    finally:
        handle.remove()
    return len(read) == 1 and _equal(read[0], states) and _equal(logits, head(states) * FACTOR)


def _equal(one: Tensor, other: Tensor) -> bool:
    """In value, whatever the types."""
    return one.shape == other.shape and bool((one == other).all())
