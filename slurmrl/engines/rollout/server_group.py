"""A process group of this process and the ranks of one server, over which weights are sent.

It is one of gloo, also with servers on GPUs. Gloo's calls have time limits and end with their
peers, whereas NCCL's watchdog would end this process where a server ends or hangs.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from slurmrl.config.servers import Address
from slurmrl.errors import RunFailedError

T = TypeVar("T")
NAME = "slurmrl"
"""Of the group. One that an earlier client has left on the server is replaced."""
BACKEND = "gloo"
JOIN_S = 60.0
"""Within this time the server must begin to join, and then all of its ranks must have joined."""
SEND_S = 120.0
"""Time limit of sending a tensor."""
NOTE_S = 10.0
"""For a note of a rank that has answered."""
POLL_S = 0.001
LOOPBACK = "127.0.0.1"
ANY_PORT, DATAGRAM = 9, socket.SOCK_DGRAM
"""No packet is sent."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a server meet this process, which is rank 0, as ``torch.distributed``
    does."""

    host: str
    port: int
    ranks: int
    """Including this process."""


class ServerGroup:
    """A group that all of its ranks have joined. An error leaves it in an undefined state, in which
    it can only be closed."""

    def __init__(self, group: Any, store: TCPStore, *, ranks: int) -> None:
        self._group, self._ranks = group, ranks
        self._store: TCPStore | None = store
        self._sent: Any = None
        """The newest broadcast."""

    @classmethod
    async def meet(
        cls,
        invite: Callable[[Meeting], Coroutine[Any, Any, object]],
        address: Address,
        *,
        ranks: int,
    ) -> ServerGroup:
        """Form the group with the ``ranks`` of the server at ``address``, which ``invite`` asks to
        join. Raises RunFailedError if a rank does not join, and what ``invite`` raises."""
        host = await asyncio.to_thread(_own_host, address)
        store = _serve(host)
        meeting = Meeting(host=host, port=store.port, ranks=1 + ranks)
        known = store.num_keys()

        invited = asyncio.ensure_future(invite(meeting))

        async def join() -> Any:
            deadline = time.monotonic() + JOIN_S
            while store.num_keys() == known:  # a server that refuses says so without joining
                if invited.done() or time.monotonic() > deadline:
                    raise RunFailedError(
                        f"{address.text} did not begin to join a process group at {host}, port "
                        f"{meeting.port}; its log may say why"
                    )
                await asyncio.sleep(POLL_S)
            return await asyncio.to_thread(join_group, store, host, rank=0, ranks=meeting.ranks)

        try:
            _, group = await both(invited, join())
        except RuntimeError as error:  # of torch
            raise RunFailedError(
                f"{address.text} did not join a process group of {meeting.ranks} ranks at {host}, "
                f"port {meeting.port}: {error}"
            ) from error
        return cls(group, store, ranks=meeting.ranks)

    async def broadcast(self, tensor: Tensor, answer: Coroutine[Any, Any, T]) -> T:
        """Send a tensor of this host's memory to all ranks of the server, and return their
        ``answer``. What one of the two raises ends the other one. Raises RunFailedError if it
        cannot be sent."""

        received, _ = await both(answer, self.send(tensor))
        return received

    async def send(self, tensor: Tensor) -> None:
        """As `broadcast`, to ranks that receive already."""
        try:
            self._sent = self._group.broadcast(tensor, 0, timedelta(seconds=SEND_S))
            while not self._sent.is_completed():
                await asyncio.sleep(POLL_S)
            self._sent.wait()
        except RuntimeError as error:
            raise RunFailedError(f"weights were not sent: {error}") from error

    async def notes(self, topic: str) -> list[str]:
        """What each rank of the server has noted about ``topic`` (`note`). Raises RunFailedError if
        one has not."""
        return [await asyncio.to_thread(self._note, topic, rank) for rank in range(1, self._ranks)]

    def _note(self, topic: str, rank: int) -> str:
        name = _place_of_note(topic, rank)
        assert self._store is not None, "not closed"
        try:
            self._store.wait([name], timedelta(seconds=NOTE_S))
            return self._store.get(name).decode(errors="replace")
        except RuntimeError as error:
            raise RunFailedError(f"rank {rank} says nothing of {topic}: {error}") from error

    def close(self) -> None:
        """Leave the group, which cannot be used any more. What is still being sent ends by its time
        limit."""
        if self._sent is not None and not self._sent.is_completed():
            threading.Thread(target=_hold, args=(self._sent, self._group), daemon=True).start()
        # An exception may still refer to this object, and ranks would wait for what it sends.
        self._group = self._store = self._sent = None


def _hold(sent: Any, group: Any) -> None:
    """Until a broadcast has ended: the destructor of its group would wait for it, and stop all
    threads of Python meanwhile."""
    while not sent.is_completed():
        time.sleep(0.1)


def _serve(host: str) -> TCPStore:
    """A store that listens at this address alone, and on a port that was free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def note(store: Store, topic: str, rank: int, text: str) -> None:
    """On a rank of the server: tell this process."""
    store.set(_place_of_note(topic, rank), text)


def _place_of_note(topic: str, rank: int) -> str:
    return f"notes/{topic}/{rank}"


def join_group(store: Store, host: str, *, rank: int, ranks: int) -> Any:
    """The group of ``ranks`` that meet in a store, with this process as ``rank``, which listens at
    ``host``. Returns once all have joined."""
    inside = PrefixStore("cpu/", PrefixStore(f"{NAME}/", PrefixStore(NAME, store)))
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=JOIN_S)
    return ProcessGroupGloo(inside, rank, ranks, options)


def _own_host(address: Address) -> str:
    """The address of this host for what listens at ``address``."""
    if address.socket is not None:
        return LOOPBACK
    try:
        return host_towards(str(urlsplit(address.text).hostname))
    except OSError as error:
        raise RunFailedError(f"{address.text} cannot be reached: {error}") from error


def host_towards(host: str) -> str:
    """The address of this host from which it reaches another one. Raises OSError."""
    for family, kind, _, _, target in socket.getaddrinfo(host, ANY_PORT, type=DATAGRAM):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.connect(target)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {host}")


async def both(one: Awaitable[T], other: Awaitable[Any]) -> tuple[T, Any]:
    """The results of both; what one of them raises ends the other one."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        first, second = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return first, second
