"""The doorbell of a rollout task: how often its rings count."""

from __future__ import annotations

import asyncio
import select
from contextlib import closing

import pytest

from slurmrl.run.channel.bell import Bell
from slurmrl.workers.rollout.session import TaskBell

DEADLINE_S, NEVER_S = 60.0, 3600.0


async def counted(bell: TaskBell, times: int) -> None:
    """Wait until so many rings have counted."""
    async with asyncio.timeout(DEADLINE_S):
        while bell.heard < times:
            await bell.rest(bell.heard, DEADLINE_S)


def test_endless_notifications_count_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one counts at once, so that a task is as fast as its doorbell; the others together
    once the interval is over, so that the last one is never lost.
    """

    async def listen(own: Bell, master: Bell, look_s: float) -> None:
        monkeypatch.setattr("slurmrl.workers.rollout.session.LOOK_S", look_s)
        bell, address = TaskBell(own, spread_s=0.0), own.address
        bell.ring_at(master.address)
        with bell.hung():
            master.ring([address])
            await counted(bell, 1)
            master.ring([address] * 100)
            if look_s == NEVER_S:
                while select.select([own], [], [], 0.0)[0]:
                    await asyncio.sleep(0)
                assert bell.heard == 1
            else:
                await counted(bell, 2)

    for look_s in (NEVER_S, 0.02):
        with closing(Bell("127.0.0.1")) as own, closing(Bell("127.0.0.1")) as master:
            asyncio.run(listen(own, master, look_s))
