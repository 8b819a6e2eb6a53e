"""Rounds of a supervisor with the real srun."""

from __future__ import annotations

from pathlib import Path

from slurmrl.scheduler import client
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import pids, request_of, submitted, wait_until

STOPPED_SRUN = """
import os, signal, threading, time
from argparse import Namespace
from pathlib import Path
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.client import SRUN
from slurmrl.workers.supervisor import rounds
from slurmrl.workers.supervisor.rounds import JobHosts

def started():
    return Path("pid").exists() and len(Path("pid").read_text().split()) == 2

def lost(self):
    if not started():
        return set()
    os.kill(its.child.pid, signal.SIGSTOP)
    return {"n1"}

rounds.LOOK_S, rounds.LOST_GRACE_S, rounds.KILL_GRACE_S = 0.5, 0.0, 2.0
JobHosts.lost = lost
rounds.agent_command = lambda *_, **__: [*SRUN, "sh", "-c", "echo $$ >> pid; exec sleep 600"]
paths = RunPaths(Path.cwd())
options = Namespace(launcher="srun", run=paths.run, group="trainer", submission=1)
its = rounds.Rounds(options, paths, JobHosts(paths, 2, ("n0", "n1"), job="7.0"))
Path("ended").write_text(str(its._round(0, ("n0", "n1"))))
time.sleep(600)
"""


def test_suspended_srun_is_killed_and_its_step_ends(tmp_path: Path) -> None:
    scheduler = SlurmScheduler()
    request = request_of(tmp_path, STOPPED_SRUN, links=1, hosts=2)
    request.run.code.joinpath("slurmrl").symlink_to(Path(client.__file__).parents[1])
    with submitted(scheduler, request):
        wait_until(lambda: len(pids(request)) == 2, "both tasks of the step run")
        code = request.run.run / "ended"
        wait_until(lambda: code.exists() and code.read_text(), "srun is killed")
        assert code.read_text() == "137"
        tasks = [Path(f"/proc/{pid}") for pid in pids(request)]
        wait_until(lambda: not any(task.exists() for task in tasks), "its tasks end, too")
