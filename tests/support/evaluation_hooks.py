"""Kill processes of a trial during evaluations."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmrl.run import samples
from slurmrl.run.paths import EVALUATION, RunPaths
from slurmrl.watch.sinks import MetricsRecorder
from tests.support.hooks import FOLDER

SUITES = ("sampled", "other.reward")
MASTER_STEP, WORKER_STEP = 3, 5
"""Steps after whose evaluation, and before whose commit, the master or a worker is killed."""


def processes_die_once() -> None:
    """Kill the master after it has written the scores of `MASTER_STEP`, before it records the
    metrics. Kill a worker after it has written a part file of `WORKER_STEP`. Copy the written file
    to the folder of the test.
    """
    folder = Path(os.environ[FOLDER])
    record, write_part = MetricsRecorder.write, samples.write_part

    def die_with(written: Path, name: str) -> None:
        try:
            with (folder / name).open("xb") as copy:
                copy.write(written.read_bytes())
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def recorded(self: MetricsRecorder, line: Mapping[str, Any]) -> None:
        if line["step"] == MASTER_STEP:
            run = RunPaths(self._file._file.path.parent)
            die_with(run.evaluation(MASTER_STEP, SUITES[-1]), "master")
        record(self, line)

    def written(path: Path, *arguments: Any) -> None:
        write_part(path, *arguments)
        if path.name.startswith(f"{EVALUATION}{WORKER_STEP:08d}."):
            die_with(path, "worker")

    MetricsRecorder.write = recorded  # type: ignore[method-assign]
    samples.write_part = written
