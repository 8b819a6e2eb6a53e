"""Python runs this at its start if the folder is in PYTHONPATH: agents and master then behave as on
a shared file system, which reports no changes.

SLURMRL_TEST_RINGS is a folder for one file per program, with a byte for each ring that was heeded;
with SLURMRL_TEST_CUT_OFF set, no ring arrives.
"""

import os
import sys
from pathlib import Path

PROGRAMS = ("slurmrl.workers.agent", "slurmrl.workers.master")

program = next((name for name in PROGRAMS if name in sys.orig_argv), None)
if program is not None:
    from slurmrl.run.channel import bell, follower
    from slurmrl.run.channel.bell import Bell
    from slurmrl.run.channel.follower import Follower

    follower.is_local = bell.is_local = lambda directory: False
    heeded = Path(os.environ["SLURMRL_TEST_RINGS"]) / program.rpartition(".")[2]
    hear = Follower._hear

    def hear_and_count(follower, bell):
        hear(follower, bell)
        if follower.woken:
            with heeded.open("a") as file:
                file.write(".")

    Follower._hear = hear_and_count
    if "SLURMRL_TEST_CUT_OFF" in os.environ:
        Bell.ring = lambda bell, others: None
