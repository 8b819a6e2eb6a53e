"""Python runs this module at its start if its folder is in PYTHONPATH.

Agents and master then behave as on a shared file system, which reports no changes.
SLURMRL_TEST_WAKEUPS is a folder with a file per program, which gets a byte for each wake-up that
had an effect. If SLURMRL_TEST_CUT_OFF is set, no wake-up arrives.
"""

import os
import sys
from pathlib import Path

PROGRAMS = ("slurmrl.workers.agent", "slurmrl.workers.master")

program = next((name for name in PROGRAMS if name in sys.orig_argv), None)
if program is not None:
    from slurmrl.run.channel import follower, wakeups
    from slurmrl.run.channel.follower import Follower
    from slurmrl.run.channel.wakeups import WakeupSocket

    follower.is_local = wakeups.is_local = lambda directory: False
    heeded = Path(os.environ["SLURMRL_TEST_WAKEUPS"]) / program.rpartition(".")[2]
    receive = Follower._receive

    def receive_and_count(follower, wakeups):
        receive(follower, wakeups)
        if follower.woken:
            with heeded.open("a") as file:
                file.write(".")

    Follower._receive = receive_and_count
    if "SLURMRL_TEST_CUT_OFF" in os.environ:
        WakeupSocket.wake = lambda wakeups, others: None
