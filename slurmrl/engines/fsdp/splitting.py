"""How a model's computation is split over the ranks of a context."""

from __future__ import annotations

from slurmrl.errors import UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.parallel.boxes import TensorSplit, refusals
from slurmrl.models.parallel.split import Axis, Split
from slurmrl.tensors.parallel.groups import ParallelContext


def split_of(
    role: str, config: ModelConfig | HFConfig, context: ParallelContext, *, sequence: bool
) -> Split:
    """This rank's split. Raises UsageError if the model cannot be split that way."""
    for axis in ("pp", "ep"):
        if context.axis_size(axis) > 1:
            raise UsageError(f"{role}: the fsdp engine does not split along {axis}")
    tensor, across = _axis(context, "tp"), _axis(context, "cp")
    if isinstance(config, HFConfig):
        only_data = ["a model of transformers supports data parallelism only (d)"]
        problems = only_data if tensor.size * across.size > 1 else []
    else:
        problems = list(refusals(config, tensor.size, across.size))
    if problems:
        raise UsageError(f"{role}: " + "; ".join(problems))
    return Split(tensor, across, sequence)


def tensor_split(config: ModelConfig | HFConfig, split: Split) -> TensorSplit | None:
    if isinstance(config, HFConfig) or split.tensor.size == 1:
        return None
    return TensorSplit(config, split.tensor.size, split.sequence)


def _axis(context: ParallelContext, name: str) -> Axis:
    if context.axis_size(name) == 1:
        return Axis()
    return Axis(context.axis_rank(name), context.axis_size(name), context.group(name))
