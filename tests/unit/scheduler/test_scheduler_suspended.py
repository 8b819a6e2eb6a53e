"""A local chain that was suspended, as during the sleep of a laptop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slurmrl.scheduler.local_chain import WAIT_S, LocalScheduler, chain_process
from tests.scheduler_contract import STAY, pids, request_of, submitted, wait_until


@pytest.mark.long
def test_chain_continues_if_suspended_for_longer_than_its_wait(tmp_path: Path) -> None:
    request = request_of(tmp_path, STAY, links=2)
    scheduler = LocalScheduler()
    with submitted(scheduler, request) as jobs:
        wait_until(lambda: pids(request), "link 0 has started")
        chain = chain_process(jobs["trainer"][0])
        chain.send(signal.SIGSTOP)
        time.sleep(WAIT_S + 1)  # its wait for a signal ends while it is suspended
        chain.send(signal.SIGCONT)
        os.kill(pids(request)[0], signal.SIGKILL)
        wait_until(lambda: len(pids(request)) == 2, "link 1 has started")
        assert chain.alive()
