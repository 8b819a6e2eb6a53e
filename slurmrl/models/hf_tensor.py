"""Tensor parallelism of transformers' models, by their own plans.

Each tensor rank holds parts of the matrices that the family's ``tp_plan`` names, and its own heads
and inner units. Everything else is whole on each rank: the embedding, the head, norms. FSDP2 then
shards a rank's parts as it does with a whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from slurmrl.errors import UsageError
from slurmrl.models.adapters import LORA_B, adapted_weight
from slurmrl.models.hf_config import MODULE, tensor_refusal
from slurmrl.models.parallel.split import Axis
from slurmrl.tensors.layout import Box, Index
from slurmrl.tensors.ops.collectives import partial_to_whole, whole_to_partial

COLUMNS: Final = "colwise"
"""Transformers' style of a linear layer whose outputs are split over the ranks."""
ROWS: Final = "rowwise"
"""Style of a linear layer whose inputs are split; the ranks' products are summed."""
OF_PARTS: Final = "replicated_with_grad_allreduce"
"""Style of a norm of heads: each rank has a part of the gradient."""
FIRST_INPUT: Final = "first"
"""Attribute of a linear layer: the number of its first input in the whole layer."""
WHOLE: Final = ("lm_head", "embed_tokens")
"""The embedding and the output layer: they may be one matrix, and each rank computes
log-probabilities with the whole one."""


@dataclass(frozen=True)
class HFTensorSplit:
    """How ``ranks`` tensor ranks share a model's parameters; see `TensorSplit`."""

    ranks: int
    dims: Mapping[str, int]
    """The dim along which a parameter is split, by its name; the others are on every rank."""
    partial: frozenset[str]
    """Parameters on every rank with partial gradients."""
    whole: Mapping[str, Index]
    """The shape of each whole parameter."""
    head_copies: int = 1

    def box(self, name: str, shape: Index, rank: int) -> Box:
        """A rank's part of a parameter of ``shape``."""
        dim = self._dim(name)
        if dim is None:
            return Box.whole(shape)
        size = shape[dim] // self.ranks
        start = tuple(rank * size if each == dim else 0 for each in range(len(shape)))
        return Box(start, (*shape[:dim], size, *shape[dim + 1 :]))

    def copies(self, name: str) -> int:
        """The number of ranks that have each element."""
        return self.ranks if self._dim(name) is None else 1

    def sums(self, name: str) -> bool:
        """Whether the copies' gradients are partial and must be summed; else they are equal."""
        weight = adapted_weight(name)
        return name in self.partial or (weight in self.dims and self._dim(name) is None)

    def whole_shape(self, name: str, own: Index) -> Index:
        """Return the whole shape of a parameter or adapter of which a rank has a part ``own``."""
        dim = self._dim(name)
        return own if dim is None else (*own[:dim], own[dim] * self.ranks, *own[dim + 1 :])

    def head_of(self, rank: int) -> int:
        """The key and value head of a rank, if heads are replicated."""
        return rank

    def _dim(self, name: str) -> int | None:
        """The dim along which a parameter is split.

        Of an adapter, ``lora_B`` is split with the rows of the weight, ``lora_A`` with its columns.
        """
        weight = adapted_weight(name)
        if weight is None:
            return self.dims.get(name)
        dim = self.dims.get(weight)
        return dim if dim == (0 if name.endswith(LORA_B) else 1) else None


def split_over(inner: PreTrainedModel, tensor: Axis) -> HFTensorSplit:
    """Keep this rank's part of a model on the CPU, and have its layers work together.

    Raises UsageError if the family has no plan, or a plan or sizes that are not supported.
    """
    kind = inner.config.model_type
    if reason := tensor_refusal(inner.config.to_dict(), tensor.size):
        raise UsageError(reason)
    whole = {MODULE + name: tuple(each.shape) for name, each in inner.named_parameters()}
    dims: dict[str, int] = {}
    of_parts: set[str] = set()
    linear: set[str] = set()
    blocks: set[str] = set()
    for name, module, style in _styled(inner):
        parameters = [f"{MODULE}{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        if style == OF_PARTS:
            of_parts.update(parameters)
            continue
        if style not in (COLUMNS, ROWS) or not isinstance(module, nn.Linear):
            raise UsageError(
                f"{kind} models cannot be split over tensor ranks: transformers' tp_plan splits "
                f"{name} by '{style}', which is not supported"
            )
        for parameter in parameters:
            if style == COLUMNS or parameter.endswith("weight"):
                dims[parameter] = 0 if style == COLUMNS else 1
        linear.update(parameters)
        blocks.add(f"{MODULE}{name.rpartition('.')[0]}.")
        _cut(name, module, style, tensor)
    # Transformers before `OF_PARTS` leaves the norms of heads, between split layers, out of plans.
    of_parts.update(each for each in whole if each not in linear and each.startswith(tuple(blocks)))
    if not dims:
        raise UsageError(f"{kind} models have no tp_plan of transformers: leave out t")
    return HFTensorSplit(tensor.size, dims, frozenset(of_parts), whole)


def _styled(inner: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each module that the plan names, and its style."""
    plan: Mapping[str, str] = getattr(inner, "tp_plan", None) or {}
    patterns = {re.escape(key).replace(r"\*", r"\d+"): key for key in plan}
    named: dict[str, Any] = {**dict(inner.named_parameters()), **dict(inner.named_modules())}
    for name, found in named.items():
        key = next((key for pattern, key in patterns.items() if re.fullmatch(pattern, name)), None)
        if key is not None and name.rpartition(".")[2] not in WHOLE:
            yield name, found, plan[key]


@torch.no_grad()
def _cut(name: str, module: nn.Linear, style: str, tensor: Axis) -> None:
    """Keep a rank's part of a linear layer, and give the layer its collective."""
    dim = 0 if style == COLUMNS else 1
    if module.weight.shape[dim] % tensor.size:
        raise UsageError(
            f"t{tensor.size} does not divide {module.weight.shape[dim]}, the size of {name}"
        )
    own = module.weight.chunk(tensor.size, dim)[tensor.rank].clone()
    module.weight = nn.Parameter(own, requires_grad=module.weight.requires_grad)
    if style == COLUMNS:
        module.out_features = own.shape[0]
        if module.bias is not None:
            part = module.bias.chunk(tensor.size)[tensor.rank].clone()
            module.bias = nn.Parameter(part, requires_grad=module.bias.requires_grad)
        module.register_forward_pre_hook(_entering(tensor))
    else:
        module.in_features = own.shape[1]
        vars(module)[FIRST_INPUT] = tensor.rank * own.shape[1]
        vars(module)["forward"] = partial(_product, module)
        module.register_forward_hook(_leaving(tensor))


def _entering(tensor: Axis) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def enter(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (whole_to_partial(given[0], tensor.group), *given[1:])

    return enter


def _product(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight)


def _leaving(tensor: Axis) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """Sum products over the ranks. Adapters add theirs before, by a hook in front."""

    def leave(module: nn.Module, _: Any, products: Tensor) -> Tensor:
        whole = partial_to_whole(products, tensor.group)
        bias = cast(nn.Linear, module).bias
        return whole if bias is None else whole + bias

    return leave
