"""Differentiable collectives, and broadcasts of bytes.

The ranks of a group share one model. A "whole" tensor is equal on all ranks, a "partial" tensor
must be summed over the ranks, and an "own" tensor is a rank's equal share of dim 0. The loss is
whole. The backward pass of a collective is the inverse collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Collective = Callable[[Tensor, Group], Tensor]

# torch 2.13 deprecates the old names of these functions, but torch 2.11 has no others.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def whole_to_partial(x: Tensor, group: Group) -> Tensor:
    """Return the tensor itself; the backward pass sums its partial gradients."""
    return _call(_WholeToPartial, x, group)


def partial_to_whole(x: Tensor, group: Group) -> Tensor:
    """Return the sum over all ranks."""
    return _call(_PartialToWhole, x, group)


def own_to_whole(x: Tensor, group: Group) -> Tensor:
    """Return all ranks' shares of dim 0; the gradient of the result is whole."""
    return _call(_OwnToWhole, x, group)


def own_to_partial(x: Tensor, group: Group) -> Tensor:
    """Return all ranks' shares of dim 0; the gradient of the result is partial."""
    return _call(_OwnToPartial, x, group)


def partial_to_own(x: Tensor, group: Group) -> Tensor:
    """Return this rank's share of dim 0 of the sum over the ranks."""
    return _call(_PartialToOwn, x, group)


def exchange(x: Tensor, group: Group) -> Tensor:
    """Send one part of dim 0 to each rank (all-to-all); return received parts in rank order."""
    return _call(_Exchange, x, group)


def gathered(x: Tensor, group: Group) -> Tensor:
    """Return the tensors of all ranks, of one shape, concatenated in dim 0; without gradients."""
    x = x.contiguous()
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    all_gather(out, x, group=group)
    return out


def _call(function: type[torch.autograd.Function], x: Tensor, group: Group) -> Tensor:
    out: Tensor = function.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _scattered(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    reduce_scatter(out, x, group=group)
    return out


def _exchanged(x: Tensor, group: Group) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _function(forward: Collective, backward: Collective) -> type[torch.autograd.Function]:
    """Return an autograd function that computes ``forward``, and gradients with ``backward``."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.group), None

    return Function


def _own(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size())[group.rank()].contiguous()


_WholeToPartial = _function(lambda x, _: x.view_as(x), _summed)
_PartialToWhole = _function(_summed, lambda grad, _: grad)
_OwnToWhole = _function(gathered, _own)
_OwnToPartial = _function(gathered, _scattered)
_PartialToOwn = _function(_scattered, gathered)
_Exchange = _function(_exchanged, _exchanged)


def broadcast_bytes(
    content: bytes, group: Group, device: torch.device, *, source: int = 0
) -> bytes:
    """Return the ``content`` of rank ``source`` on all ranks of the group. Collective."""
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    own = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8).to(device)
    return bytes(broadcast_sized(own, int(size), group, source).cpu().numpy())


def broadcast_sized(own: Tensor, size: int, group: Group, source: int = 0) -> Tensor:
    """Return the ``size`` bytes ``own`` of rank ``source`` on all ranks. Collective."""
    buffer = own if dist.get_rank(group) == source else own.new_empty(size)
    if size:
        dist.broadcast(buffer, group=group, group_src=source)
    return buffer
