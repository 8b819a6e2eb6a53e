"""The wake-ups of a rollout task, and how often they have an effect."""

from __future__ import annotations

import asyncio
import select
from contextlib import closing

import pytest

from slurmrl.run.channel.wakeups import WakeupSocket
from slurmrl.workers.rollout.session import MasterWakeups

DEADLINE_S, NEVER_S = 60.0, 3600.0


async def counted(wakeups: MasterWakeups, times: int) -> None:
    """Wait until this many wake-ups have had an effect."""
    async with asyncio.timeout(DEADLINE_S):
        while wakeups.heard < times:
            await wakeups.rest(wakeups.heard, DEADLINE_S)


def test_endless_notifications_count_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wake-up has an immediate effect, so a task reacts quickly. The others have one
    common effect after the interval, so the last one is never lost.
    """

    async def listen(own: WakeupSocket, master: WakeupSocket, look_s: float) -> None:
        monkeypatch.setattr("slurmrl.workers.rollout.session.LOOK_S", look_s)
        wakeups, address = MasterWakeups(own, spread_s=0.0), own.address
        wakeups.wake_at(master.address)
        with wakeups.listening():
            master.wake([address])
            await counted(wakeups, 1)
            master.wake([address] * 100)
            if look_s == NEVER_S:
                while select.select([own], [], [], 0.0)[0]:
                    await asyncio.sleep(0)
                assert wakeups.heard == 1
            else:
                await counted(wakeups, 2)

    for look_s in (NEVER_S, 0.02):
        with (
            closing(WakeupSocket("127.0.0.1")) as own,
            closing(WakeupSocket("127.0.0.1")) as master,
        ):
            asyncio.run(listen(own, master, look_s))
