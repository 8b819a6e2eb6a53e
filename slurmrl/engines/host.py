"""Copies of tensors in host memory, in reused buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """Buffers by name, pinned for tensors of a GPU, which makes copying fast."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors. The next call overwrites the result."""
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or (found.shape, found.dtype) != (like.shape, like.dtype):
            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = found
        return found
