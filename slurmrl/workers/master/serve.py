"""The master process from its start to its exit code."""

from __future__ import annotations

import json
import shutil
import traceback
from pathlib import Path
from typing import Any

from slurmrl import keys, log
from slurmrl.config.load import load_resolved
from slurmrl.errors import (
    NameExistsError,
    RunFailedError,
    StaleIncarnationError,
    TrialEndedError,
)
from slurmrl.fsio import ownership
from slurmrl.fsio.atomic import remove
from slurmrl.history.log import History
from slurmrl.history.record import Record
from slurmrl.history.state import TrialState, fold
from slurmrl.history.writer import IncarnationWriter, begin
from slurmrl.monitor.recorder import Recorder
from slurmrl.name_resolve import make
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import load_run_settings
from slurmrl.workers.master import limits
from slurmrl.workers.master.judgement import judge
from slurmrl.workers.master.master import Master
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.master.start import restore

logger = log.get(__name__)


def serve(run: Path, submission: int, job: str, link: int) -> int:
    """Run one incarnation; 0 when the trial ended or handed over, 1 when it failed."""
    for warning in ownership.check(run):
        logger.warning("%s", warning)
    paths = RunPaths(run)
    names = make("file", directory=paths.names)
    history = History(paths.history)
    try:
        data = {"job": job, "submission": submission, "link": link}
        writer = begin(history, data, lambda records: _judge(paths, names, job, records))
    except TrialEndedError as end:
        logger.info("nothing to do: %s", end)
        return 0
    try:
        _lead(paths, names, history, writer)
    except TrialEndedError as end:
        logger.info("leaving: %s", end)
    except StaleIncarnationError as error:
        logger.warning("leaving: %s", error)
        return 1
    except Exception as error:  # noqa: BLE001 - the process boundary: report it and end
        traceback.print_exc()
        _report(names, writer.incarnation, error)
        return 1
    return 0


def _judge(
    paths: RunPaths, names: NameStore, job: str, records: list[Record]
) -> dict[str, Any] | None:
    """What the FAILED record says, if another incarnation would be in vain."""
    config = load_resolved(paths.config)
    verdict = judge(
        records,
        names,
        job,
        config.max_restarts_without_commit,
        lambda ending: limits.explain(paths, config, ending),
    )
    return verdict.data if verdict is not None else None


def _lead(paths: RunPaths, names: NameStore, history: History, writer: IncarnationWriter) -> None:
    settings = load_run_settings(paths)
    state = fold(history.read())
    _clean(paths, state)
    progress = Progress(settings, restore(paths, state))
    base = state.last_commit.step if state.last_commit is not None else -1
    recorder = Recorder(paths, settings.config.logging, last_step=base)
    plan = Plan.read(paths.plan)
    Master(paths, settings.config, plan, names, writer, state, progress, recorder).run()


def _clean(paths: RunPaths, state: TrialState) -> None:
    """Remove what earlier incarnations left and the history does not name: half-written
    checkpoints, and control logs that nobody reads any more.

    Only theirs: they cannot commit any more, while a newer incarnation may have begun since
    ``state`` was read and may be writing.
    """
    named = {commit.directory for commit in state.commits}
    for directory in paths.checkpoints.iterdir():
        writer = directory.name.rpartition(".")[2]
        old = writer.isdecimal() and int(writer) < state.incarnation
        if old and directory.name not in named:
            shutil.rmtree(directory, ignore_errors=True)
    for log_file in paths.control.iterdir():
        number = log_file.name.partition(".")[0]
        if number.isdecimal() and int(number) < state.incarnation:  # not NFS's own .nfs files
            remove(log_file)


def _report(names: NameStore, incarnation: int, error: Exception) -> None:
    """Publish why this incarnation failed, unless a rank was first."""
    failure = {
        "reason": f"master: {type(error).__name__}: {error}",
        "traceback": "" if isinstance(error, RunFailedError) else traceback.format_exc(),
    }
    try:
        names.add(keys.failure(incarnation), json.dumps(failure), delete_on_exit=False)
    except NameExistsError:
        logger.info("another failure was reported first")
