"""How a model of transformers computes logits from its hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FACTOR = 2.0**10
"""Scale of the trial logits. A power of two, so that scaling is exact; large, so that caps show."""


@torch.no_grad()
def only_multiplies(model: Any) -> bool:
    """Return whether logits are only a product of the last hidden states and the projection.

    ``model`` is a ``PreTrainedModel`` on the CPU. The projection is the weight of the output layer,
    without bias, cap or scale. Configs do not state this, so a few tokens are tried. Return False
    if they cannot be tried.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or head.bias is not None or body is model:
        return False
    ids = torch.arange(min(4, head.out_features))[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    head_inputs: list[Tensor] = []

    def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        return output * FACTOR

    handle = head.register_forward_hook(amplify)
    try:
        states, logits = body(**given).last_hidden_state, model(**given).logits
    except Exception:  # noqa: BLE001 - the model's own code may raise anything
        return False  # for example, it needs a GPU or other arguments
    finally:
        handle.remove()
    return (
        len(head_inputs) == 1
        and _equal(head_inputs[0], states)
        and _equal(logits, head(states) * FACTOR)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Equal shapes and values; dtypes may differ."""
    return one.shape == other.shape and bool((one == other).all())
