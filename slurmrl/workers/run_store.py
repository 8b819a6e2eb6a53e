"""The store in which the ranks of a process group find each other, in the run directory.

torch's own TCPStore listens on a port without a key: any user of the network could write the
addresses to which ranks connect, and what else they read from it. The run directory belongs to the
user. One file per key: a rank writes its keys once and reads those of the others once, while the
group forms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from slurmrl.backoff import READ_S, Backoff, retry
from slurmrl.fsio import atomic
from slurmrl.fsio.failures import explain

T = TypeVar("T")

SHORTEST_POLL_S = 0.02
POLL_S_PER_RANK = 0.0005
"""Together, waiting ranks list the directory at most 2000 times a second."""


class RunStore(Store):
    """The store of one world in ``directory``, which its ranks create.

    torch calls it from C++, and needs no other methods to form groups of gloo and NCCL. It must
    live as long as the groups, and so must every store that `clone` returns.
    """

    def __init__(self, directory: Path, world_size: int, timeout: timedelta) -> None:
        """``timeout``: of `get`, and of `wait` where the caller names none."""
        super().__init__()
        atomic.make_private_directory(directory)
        self._directory = directory
        self._longest_poll_s = max(SHORTEST_POLL_S, POLL_S_PER_RANK * world_size)
        self._timeout = timeout
        self._seen: set[str] = set()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        path = self._directory / _file_name(key)
        _retry("write", lambda: atomic.replace(path, data, durable=False))

    def get(self, key: str) -> bytes:
        """Return the value of a key once a rank has set it. Raises DistStoreError after the
        time-out, EnvironmentFailure if the directory does not answer."""
        self.wait([key])
        path = self._directory / _file_name(key)
        return _retry("read", lambda: atomic.read_needed(path))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set. The directory is listed, because an NFS client may
        believe for a minute that a file that it has looked for is missing."""
        names = {_file_name(key) for key in keys}
        if not names <= self._seen:
            self._seen.update(_retry("list", self._names))
        return names <= self._seen

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are set. Raises DistStoreError after the time-out."""
        within = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + within.total_seconds()
        backoff = Backoff(last_s=self._longest_poll_s)
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(
                    f"timed out waiting {within.total_seconds():.0f} s for {', '.join(keys)} in "
                    f"{self._directory}"
                )
            backoff.sleep()

    def clone(self) -> RunStore:
        """Return this store itself, which holds no connection: torch's NCCL monitor uses the clone
        in a thread of its own."""
        return self

    def _names(self) -> list[str]:
        try:
            return atomic.list_names(self._directory)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error


def _retry(what: str, action: Callable[[], T]) -> T:
    return retry(f"{what} what the ranks tell each other", action, timeout_s=READ_S)


def _file_name(key: str) -> str:
    """Return a name for a key of any length and with any characters."""
    return sha256(key.encode()).hexdigest()
