"""Free the device memory of tensors and restore it later, with all views intact."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slurmrl.engines.host import HostCopies
from slurmrl.errors import UsageError


class Offload:
    """Storages whose contents move to host memory between ``take`` and ``give``."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._taken = False
        self._host = HostCopies()
        self._kept: list[tuple[torch.UntypedStorage, int]] = []
        self._copies: dict[str, Tensor] = {}
        """By position in ``_kept``."""

    def check(self) -> None:
        """Raises UsageError between ``take`` and ``give``."""
        if self._taken:
            raise UsageError(
                f"{self._role} is offloaded: its weights are in host memory until onload()"
            )

    def take(self, kept: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> None:
        """Free the storages of these tensors. ``scratch`` loses its contents and is restored as
        zeros. No-op if already taken."""
        if self._taken:
            return
        self._taken = True
        seen: set[int] = set()
        contents: dict[str, Tensor] = {}
        for tensors, copied in ((kept, True), (scratch, False)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # (host memory that numpy has looked at cannot be freed, and need not be)
                if storage.data_ptr() in seen or not storage.nbytes() or not storage.resizable():
                    continue
                seen.add(storage.data_ptr())
                if copied:
                    contents[str(len(self._kept))] = _bytes(tensor)
                self._kept.append((storage, storage.nbytes()))
        self._copies = self._host.copy(contents)
        for storage, _ in self._kept:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._kept):
            torch.cuda.empty_cache()  # for the other processes on the card

    def give(self) -> None:
        """Undo ``take``."""
        for number, (storage, size) in enumerate(self._kept):
            storage.resize_(size)
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if (copy := self._copies.get(str(number))) is None:
                whole.zero_()
            else:
                whole.copy_(copy)
        self._kept.clear()
        self._copies.clear()
        self._taken = False


def _bytes(tensor: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
