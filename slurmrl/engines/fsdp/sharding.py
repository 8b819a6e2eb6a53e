"""FSDP2 sharding of a decoder over data- and context-parallel ranks.

The module also sums gradients over copies, computes their global norm and clips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from slurmrl.errors import RunFailedError
from slurmrl.models.base import PackedModel
from slurmrl.models.parallel.boxes import SharedParameters
from slurmrl.models.parallel.split import Axis
from slurmrl.tensors.parallel.groups import ParallelContext

CLIP_EPS = 1e-6
"""Number added to the norm when gradients are clipped, as in torch.nn.utils.clip_grad_norm_."""


@dataclass(frozen=True)
class ShardPlan:
    """Choices for sharding a decoder."""

    wrapped: bool
    """Whether FSDP2 is used; a single float32 rank does not need it."""
    small: bool
    """Whether the whole model is one unit, gathered from the first micro-batch's forward to the
    last micro-batch's backward. Otherwise each layer, the embedding and the vocabulary projection
    are units, gathered when needed."""
    mixed: bool
    """Whether float32 shards are gathered and computed in bfloat16, with gradients reduced in
    float32."""
    offload: bool = False
    """Whether shards and gradients are in host memory, and a unit is copied to the GPU for its use.
    """


class Shards:
    """A decoder and this rank's chunks of its parameters, sharded between calls."""

    def __init__(self, decoder: PackedModel, plan: ShardPlan, context: ParallelContext) -> None:
        """Shard ``decoder``; on the meta device, allocate uninitialized parameters."""
        self.decoder = decoder
        self.plan = plan
        self._stuck = False
        bare = any(p.is_meta for p in decoder.parameters())
        if plan.wrapped:
            _wrap(decoder, plan, context)
        self._home = torch.device("cpu") if plan.offload else context.device
        if bare:
            decoder.to_empty(device=self._home)
        else:
            decoder.to(self._home)
        for module in decoder.modules():  # FSDP moves only parameters to the device.
            for name, values in module.named_buffers(recurse=False):
                setattr(module, name, values.to(context.device))

    def local(self) -> dict[str, Tensor]:
        """Return this rank's chunk of each parameter; writing to it changes the parameter."""
        return {name: _local(p.detach()) for name, p in self.decoder.named_parameters()}

    def trained(self) -> dict[str, Tensor]:
        """Return the chunks in `local` whose parameters are trained."""
        return {
            name: _local(p.detach())
            for name, p in self.decoder.named_parameters()
            if p.requires_grad
        }

    def take_gradients(self) -> dict[str, Tensor]:
        """Return this rank's chunk of each gradient, summed over ranks; clear the gradients."""
        gradients = {
            name: _local(p.grad)
            for name, p in self.decoder.named_parameters()
            if p.grad is not None
        }
        self.decoder.zero_grad(set_to_none=True)
        return gradients

    def set_last_micro_batch(self, last: bool) -> None:
        """Set whether the next backward pass is the last of the step.

        A small model reduces its gradients and frees its gathered parameters only in the last pass.
        """
        if self.plan.wrapped and self.plan.small:
            root = cast(FSDPModule, self.decoder)
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def reshard(self) -> None:
        for unit in self._units():
            unit.reshard()

    @contextmanager
    def resharded(self) -> Iterator[None]:
        """Reshard at the end, even after an exception."""
        try:
            yield
        finally:
            self.reshard()

    @contextmanager
    def cleared_on_error(self) -> Iterator[None]:
        """Drop gathered parameters and gradients after an exception in the block.

        Raises RunFailedError if an earlier step failed and this torch cannot reset FSDP.
        """
        if self._stuck:
            raise RunFailedError(
                f"an earlier step failed, and torch {torch.__version__} cannot reset FSDP after "
                "a failure (2.13 and newer can): create a new engine"
            )
        try:
            yield
        except BaseException:
            self._clear()
            raise

    @contextmanager
    def gathered(self) -> Iterator[PackedModel]:
        """Yield the decoder with all parameters gathered, for calls without collectives."""
        with self.resharded():
            for unit in self._units():
                unit.unshard()
                unit.set_reshard_after_forward(False, recurse=False)
            try:
                yield self.decoder
            finally:
                for unit in self._units():
                    again = cast(nn.Module, unit) not in _kept_after_forward(self.decoder)
                    unit.set_reshard_after_forward(again, recurse=False)

    def _clear(self) -> None:
        self.decoder.zero_grad()  # Clear the gradients of gathered parameters.
        root = cast(FSDPModule, self.decoder)
        if self.plan.wrapped and root._get_fsdp_state()._is_root:  # set by the first forward
            self._stuck = not hasattr(root, "reset_iter_state")  # older than torch 2.13
            if not self._stuck:
                root.reset_iter_state()
            self.decoder.zero_grad()  # Clear the gradients of the shards.
        # Contrary to its documentation, reset_iter_state keeps unreduced gradients: discard them.
        for unit in self._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                parameter.unsharded_accumulated_grad = None

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.decoder.modules() if isinstance(module, FSDPModule)]


def _wrap(decoder: PackedModel, plan: ShardPlan, context: ParallelContext) -> None:
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if plan.mixed
        else MixedPrecisionPolicy()
    )
    pinned = context.device.type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if plan.offload else OffloadPolicy()
    wrap = partial(fully_shard, mesh=context.mesh, mp_policy=policy, offload_policy=place)
    ends = [unit for unit in (decoder.embedding, decoder.projection) if unit is not None]
    kept = _kept_after_forward(decoder)
    for unit in () if plan.small else (*decoder.layers, *ends):
        wrap(unit, reshard_after_forward=unit not in kept)
    wrap(decoder, reshard_after_forward=False)
    # The engine divides the loss by the global denominator, so gradients are summed, not averaged.
    for unit in decoder.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def _kept_after_forward(decoder: PackedModel) -> tuple[nn.Module | None, ...]:
    """Return the units that stay gathered until their backward pass: the root and the projection.

    The root's head is used after the root's forward pass. The projection's backward pass comes
    first, so freeing it would only cause another gather.
    """
    return decoder, decoder.projection


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def sum_copies(
    gradients: Mapping[str, Tensor], split: SharedParameters, tensor: Axis, device: torch.device
) -> None:
    """Sum, in place, the partial gradients of parameters that are on several tensor ranks.

    Collective over the tensor ranks, on ``device``; all of them have gradients of the same names.
    """
    names = [name for name in gradients if split.sums(name)]
    everywhere = [gradients[name] for name in names if split.copies(name) == split.ranks]
    _sum(everywhere, tensor, device, count=1, row=0)
    on_some = [gradients[name] for name in names if split.copies(name) < split.ranks]
    heads = split.ranks // split.head_copies
    _sum(on_some, tensor, device, count=heads, row=split.head_of(tensor.rank))


@torch.no_grad()
def take_first_copies(
    gradients: Mapping[str, Tensor], split: SharedParameters, tensor: Axis, device: torch.device
) -> None:
    """Replace whole gradients, in place, by the gradients of the first tensor rank.

    Each tensor rank computes whole gradients from the same inputs. Some GPU kernels, such as the
    backward pass of flash attention, sum in varying orders, so the copies of a parameter would
    slowly become different.

    Collective over the tensor ranks, on ``device``; all of them have gradients of the same names.
    """
    for name, gradient in gradients.items():
        if split.copies(name) == split.ranks and not split.sums(name) and gradient.numel():
            first = gradient.to(device).contiguous()
            dist.broadcast(first, group=tensor.group, group_src=0)
            gradient.copy_(first)


def _sum(
    gradients: Sequence[Tensor], tensor: Axis, device: torch.device, *, count: int, row: int
) -> None:
    """Sum the gradients of ranks with the same ``row``; one collective sums all ``count`` rows."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = flat.new_zeros((count, flat.shape[0]), device=device)
    rows[row] = flat
    dist.all_reduce(rows, group=tensor.group)
    parts = rows[row].split_with_sizes([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def global_norm(
    gradients: Mapping[str, Tensor],
    groups: Sequence[dist.ProcessGroup] = (),
    copies: Callable[[str], int] = lambda name: 1,
    device: torch.device | None = None,
) -> float:
    """Return the 2-norm of gradients whose chunks are on the ranks of ``groups`` (axes of a grid).

    ``copies`` returns how many ranks have each element of a parameter. Squares are summed in
    float64, over ranks on ``device`` (None: the device of the gradients).
    """
    norms = torch._foreach_norm(list(gradients.values()))
    squares = torch.stack(norms).double().square()
    times = [copies(name) for name in gradients]
    if any(count > 1 for count in times):
        squares = squares / torch.tensor(times, dtype=torch.float64, device=squares.device)
    total = squares.sum().to(device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())


@torch.no_grad()
def clip(gradients: Mapping[str, Tensor], norm: float, limit: float | None) -> None:
    """Scale gradients in place so that their global norm is at most ``limit``."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(list(gradients.values()), limit / (norm + CLIP_EPS))
