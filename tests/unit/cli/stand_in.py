"""A program that links execute in tests in place of the supervisor. It trains nothing, but writes
the files and follows the commands of a real master. ``stand_in.py RUN_DIR STEPS train|fail|held``:
with ``held``, it trains its second step after a file ``go`` appears in RUN_DIR.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import slurmrl
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, fold
from slurmrl.run.lease import Lease
from slurmrl.run.metrics import MetricsWriter, cut
from slurmrl.run.paths import RunPaths


def main(run: str, total: str, mode: str) -> int:
    paths, warned = RunPaths(Path(run)), []
    signal.signal(signal.SIGUSR2, lambda number, frame: warned.append(number))
    history = History(paths.history)
    state = fold(history.read())
    if state.end is not None:
        return 0
    writer = begin(history, {"code": slurmrl.__file__})
    names = NameStore(paths.names)
    identity = {"group": "trainer", "task": 0, "attempt": writer.incarnation, "host": "here"}
    key = keys.attempt("trainer", 0, writer.incarnation)
    names.add(key, json.dumps({**identity, "job": "", "job_id": ""}))
    step = state.last_commit.step if state.last_commit else 0
    cut(paths.metrics, step)
    metrics = MetricsWriter(paths.metrics)
    lease = Lease(paths.lease("trainer", 0, writer.incarnation))
    print(f"stand-in of incarnation {writer.incarnation} at step {step}", flush=True)
    if mode == "fail":
        writer.append(Kind.FAILED, {"reason": "ValueError: planted", "traceback": "Traceback …"})
        return 1
    while step < int(total) and not warned:
        lease.beat()
        time.sleep(0.1)
        if mode == "held" and step == 1 and not (paths.run / "go").exists():
            continue
        step += 1
        line = {"step": step, "reward": step / int(total), "tokens_per_s": 10.0}
        metrics.write(line)
        said = {"incarnation": writer.incarnation, "step": step, "metrics": line, "tasks": {}}
        names.add(keys.status(), json.dumps(said), replace=True)
    writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}"})
    if step >= int(total):
        writer.append(Kind.FINISHED, {"step": step, "reason": "total_steps"})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
