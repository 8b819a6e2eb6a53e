"""Process groups with a server: what it gets, and what ends a broadcast that nobody receives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from slurmrl.config.servers import Address
from slurmrl.engines.rollout import server_group
from slurmrl.engines.rollout.server_group import Meeting, ServerGroup
from slurmrl.errors import RunFailedError

PEER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
host, port, rank, ranks, size = sys.argv[1], *map(int, sys.argv[2:])
store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
store.set(f"notes/place/{rank}", f"rank {rank}")
inside = dist.PrefixStore("cpu/", dist.PrefixStore("slurmrl/", dist.PrefixStore("slurmrl", store)))
group = dist.ProcessGroupGloo(inside, rank, ranks, timedelta(seconds=600))
print("joined", flush=True)
received = torch.zeros(size, dtype=torch.uint8)
if sys.stdin.readline():
    group.broadcast(received, 0).wait()
    print(int(received.sum()), flush=True)
    sys.stdin.readline()
"""
BYTES = 2**26
"""More than the buffers of sockets take."""
DEADLINE_S = 60.0


class Peers:
    """The ranks of a server, in processes of their own."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.processes: list[subprocess.Popen[str]] = []

    async def join(self, meeting: Meeting) -> None:
        for rank in range(1, meeting.ranks):
            where = (meeting.host, meeting.port, rank, meeting.ranks, BYTES)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", PEER, *map(str, where)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for process in self.processes:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "joined\n"

    async def receive(self) -> list[int]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("receive\n")
            process.stdin.flush()
        return [await asyncio.to_thread(self._sum, process) for process in self.processes]

    @staticmethod
    def _sum(process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        return int(process.stdout.readline() or -1)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def peers() -> Iterator[Callable[[int], Peers]]:
    made: list[Peers] = []

    def make(ranks: int) -> Peers:
        made.append(Peers(ranks))
        return made[-1]

    yield make
    for each in made:
        each.end()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def meet(peers: Peers) -> ServerGroup:
    address = Address("http://127.0.0.1:1")
    return await ServerGroup.meet(peers.join, address, ranks=peers.ranks)


def test_all_ranks_of_a_server_get_what_is_sent(
    peers: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they note is read; one that notes nothing is named."""
    monkeypatch.setattr(server_group, "NOTE_S", 0.1)

    async def work() -> None:
        server = peers(2)
        group = await meet(server)
        assert await group.notes("place") == ["rank 1", "rank 2"]
        with pytest.raises(RunFailedError, match="rank 1 says nothing of weights"):
            await group.notes("weights")
        content = torch.ones(BYTES, dtype=torch.uint8)
        assert await group.broadcast(content, server.receive()) == [BYTES, BYTES]
        group.close()

    run(work())


def test_a_broadcast_ends_with_a_server_that_was_killed_or_refuses_it(
    peers: Callable[[int], Peers],
) -> None:
    """At once, whatever the time limit of a broadcast is: the refusal of one that nobody receives
    is what is raised, and leaving the group does not wait either."""

    async def killed(server: Peers) -> None:
        await asyncio.sleep(0.1)
        server.processes[0].kill()
        await asyncio.sleep(DEADLINE_S)

    async def refused(server: Peers) -> None:
        await asyncio.sleep(0.1)
        raise RunFailedError("no such tensor")

    async def work() -> None:
        for answer, message in ((refused, "no such tensor"), (killed, "weights were not sent")):
            server = peers(1)
            group = await meet(server)
            content = torch.ones(BYTES, dtype=torch.uint8)
            with pytest.raises(RunFailedError, match=message):
                await group.broadcast(content, answer(server))
            group.close()
            server.end()

    run(work())


def test_ranks_that_wait_for_weights_notice_that_the_group_was_left(
    peers: Callable[[int], Peers],
) -> None:
    """Also where an exception refers to what has sent them."""
    server = peers(1)

    async def work() -> None:
        group = await meet(server)
        receiving = asyncio.ensure_future(server.receive())
        group.close()
        await receiving  # until it has ended
        assert await asyncio.to_thread(server.processes[0].wait) != 0
        assert group._group is None

    run(work())


def test_a_server_that_does_not_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses or answers at once, and one that says nothing in the time that it has."""

    async def refuse(meeting: Meeting) -> None:
        raise RunFailedError("no memory for a group")

    async def answer(meeting: Meeting) -> None:
        """Its ranks have failed to join."""

    async def ignore(meeting: Meeting) -> None:
        await asyncio.sleep(DEADLINE_S)

    async def work() -> None:
        for invite, limit_s, message in (
            (refuse, 2 * DEADLINE_S, "no memory for a group"),
            (answer, 2 * DEADLINE_S, "http://localhost:1 did not begin to join"),
            (ignore, 0.2, "http://localhost:1 did not begin to join"),
        ):
            monkeypatch.setattr(server_group, "JOIN_S", limit_s)
            address = Address("http://localhost:1")
            with pytest.raises(RunFailedError, match=message):
                await ServerGroup.meet(invite, address, ranks=1)

    run(work())
