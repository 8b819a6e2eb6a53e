"""The blocks of a model of transformers that are sharded one by one."""

from __future__ import annotations

from collections import Counter

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def blocks(inner: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost modules that transformers does not split over devices.

    A family that names none has the modules that recompute. A block that shares a parameter with
    another one is left out, because a parameter belongs to one shard.
    """
    names = inner._no_split_modules or ()
    found = [module for module in inner.modules() if type(module).__name__ in names] or [
        module for module in inner.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    nested = {id(below) for module in found for below in module.modules() if below is not module}
    outer = [module for module in found if id(module) not in nested]
    uses = Counter(id(parameter) for module in outer for parameter in module.parameters())
    return [module for module in outer if all(uses[id(p)] == 1 for p in module.parameters())]
