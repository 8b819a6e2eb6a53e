"""The master process, from its start to its exit code.

``python -m slurmrl.workers.master --run RUN --submission N --job JOB --pipe-fd FD --pulse-s S``
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import env, log
from slurmrl.backoff import READ_S, retry
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config
from slurmrl.data.leases import Admission, SampleLedger
from slurmrl.errors import RunFailedError, StaleIncarnationError, TrialEndedError, UsageError
from slurmrl.fsio import atomic, calls
from slurmrl.fsio.atomic import known_names, remove
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.plan.settings import Settings, load_run_settings
from slurmrl.run import events, metrics
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.channel.wakeups import fabric_wakeups
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Record
from slurmrl.run.history.state import IncarnationWriter, Lineage, TrialState, fold
from slurmrl.run.paths import DAMAGED_PREFIX, RunPaths
from slurmrl.run.reports import HANGS, Ending, Failure
from slurmrl.tensors.checkpoint.manifest import read_state, until_certain
from slurmrl.watch.incarnation_rows import REPEATS
from slurmrl.watch.sinks import MetricsRecorder
from slurmrl.workers.child_process import (
    PIPE_FD_OPTION,
    PULSE_OPTION,
    STACKS_OPTION,
    Errand,
    allow_tracing,
    drop_failed_output,
    finish_stacks,
    kill_parent,
    stacks_wakeup,
    start_pulse,
    write_stacks_on_signal,
)
from slurmrl.workers.failure import COLLECT_S, failure_of, publish, publish_hang
from slurmrl.workers.master.committer import begin_on_base, set_aside
from slurmrl.workers.master.futility import futile_start
from slurmrl.workers.master.master import Master
from slurmrl.workers.master.progress import REQUIRED, STATE, Progress, ledger_of
from slurmrl.workers.master.results import EvaluationScores, Results
from slurmrl.workers.master.rollout_tasks import RolloutTasks, TaskNumbers
from slurmrl.workers.master.task_attempts import AttemptWakeups, rollouts_of
from slurmrl.workers.master.version_publisher import remove_leftovers
from slurmrl.workers.polling import PollIntervals

logger = log.get(__name__)


def serve(run: Path, submission: int, job: str, link: int) -> int:
    """Run one incarnation. Return 0 if the trial or job ends regularly, 1 after a failure."""
    for warning in atomic.check_ownership(run):
        logger.warning("%s", warning)
    paths = RunPaths(run)
    names = NameStore(paths.names)
    history = History(paths.history)
    try:
        host = env.NODE_NAME.get() or socket.gethostname()
        data = {"job": job, "submission": submission, "link": link, "host": host}
        writer, damages = begin_on_base(
            paths, names, history, data, lambda records: _futile_start(paths, names, job, records)
        )
    except TrialEndedError as end:
        logger.info("nothing to do: %s", end)
        return 0
    events = EventWriter(paths, f"master.{writer.incarnation}")
    master = None
    try:
        begun = {"incarnation": writer.incarnation, "base": writer.check().base}
        events.write("begin", **begun, job=job, link=link)
        set_aside(paths, writer, damages, events)
        master = _prepare(paths, names, history, writer, events)
        master.run()
    except TrialEndedError as end:
        logger.info("this master exits: %s", end)
    except StaleIncarnationError as error:
        logger.warning("this master exits: %s", error)
        return 1
    except Exception as error:  # noqa: BLE001 - the process boundary: report it and end
        failure = _fail(names, writer.incarnation, events, error)
        if master is not None:
            _end(master, names, events, failure)
        if failure.agent:
            kill_parent()  # The hanging agent would not notice this exit.
        return 1
    return 0


def _futile_start(
    paths: RunPaths, names: NameStore, job: str, records: list[Record]
) -> dict[str, Any] | None:
    """Return the data of a FAILED record if another incarnation would also fail."""
    config = retry("read the configuration", lambda: load_resolved(paths.config), timeout_s=READ_S)
    return futile_start(
        records,
        names,
        job,
        config.max_restarts_without_commit,
        lambda ending: explain_limit(paths, config, ending),
    )


def _prepare(
    paths: RunPaths,
    names: NameStore,
    history: History,
    writer: IncarnationWriter,
    events: EventWriter,
) -> Master:
    settings = retry("read the configuration", lambda: load_run_settings(paths), timeout_s=READ_S)
    state = fold(history.read())
    if state.incarnation > 1 and state.base is None:
        logger.warning("no checkpoint to resume from: the trial starts from the beginning")
    _clean(paths, state)
    plan, lineage = Plan.read(paths.plan), Lineage.of(history.read())
    if settings.config.rollout.publish is not None:
        sweep = partial(remove_leftovers, paths.versions, lineage, state.incarnation)
        retry("remove old weight versions", sweep, timeout_s=READ_S)
    committed = restore(paths, state)
    ledger, rollouts = None, None
    if settings.config.rollout.tasks is not None:
        record = ledger_of(committed) if committed is not None else None
        ledger = SampleLedger(state.incarnation, lineage, record)
        rollouts = _rollouts(
            paths, settings, plan, ledger, lineage, state.incarnation, committed, events
        )
    progress = Progress(settings, committed, ledger)
    base = state.last_step
    logging = settings.config.logging
    recorder = MetricsRecorder(paths, logging, last_step=base, incarnation=writer.incarnation)
    if lost := recorder.repeated:
        events.write(REPEATS, first=lost[0], last=lost[-1])
    results = Results(paths, settings, plan, progress, writer.incarnation)
    scores = EvaluationScores(paths, settings, writer.check)
    retry("remove scores after the last commit", partial(scores.restart, base), timeout_s=READ_S)
    return Master(
        paths,
        settings.config,
        plan,
        names,
        writer,
        state,
        progress,
        recorder,
        results,
        scores,
        rollouts,
    )


def _rollouts(
    paths: RunPaths,
    settings: Settings,
    plan: Plan,
    ledger: SampleLedger,
    lineage: Lineage,
    incarnation: int,
    committed: Mapping[str, Any] | None,
    events: EventWriter,
) -> RolloutTasks:
    """Return the rollout tasks, with the attempts and results that a commit contains."""
    config, batch_size = settings.config, settings.algorithm.batch_size
    tasks = config.rollout.tasks
    assert tasks is not None, "the caller has asked"
    admission = Admission(
        max_staleness=tasks.max_staleness,
        batch_size=batch_size,
        max_leased=tasks.max_in_flight,
        filter_rounds=settings.algorithm.refill().rounds,
    )
    known = (committed or {}).get("rollouts")
    intervals = PollIntervals.of(plan.hosts, config.cluster.heartbeat_s)
    group = plan.group(ROLLOUTS)
    return RolloutTasks(
        paths,
        ledger,
        lineage,
        admission,
        incarnation,
        events,
        rollouts_of(known, STATE) if known is not None else None,
        look_s=intervals.status_s,
        poll_s=intervals.results_s,
        lease_ttl_s=config.cluster.lease_ttl_s,
        wakeups=AttemptWakeups(fabric_wakeups(config.cluster.interface, plan.hosts)),
        numbers=TaskNumbers(
            paths,
            planned=group.hosts,
            fixed=group not in plan.jobs,
            least=tasks.min,
            patience_s=config.cluster.lease_ttl_s,
        ),
    )


def restore(paths: RunPaths, state: TrialState) -> dict[str, Any] | None:
    """Return the committed state from which to resume; None without a commit."""
    if state.last_commit is None:
        return None
    directory = paths.checkpoints / state.last_commit.directory
    return retry(
        "read the checkpoint",
        partial(until_certain, partial(read_state, directory, STATE, REQUIRED)),
        timeout_s=READ_S,
    )


def _clean(paths: RunPaths, state: TrialState) -> None:
    """Remove leftovers of earlier incarnations that the history does not name.

    These are incomplete checkpoints, old control logs and old directories of process groups. Keep
    files of newer incarnations, because an incarnation may have begun since ``state`` was read.
    Remove damaged checkpoints that were set aside only after a later incarnation has committed.
    """
    named = {commit.directory for commit in state.commits}
    committed = max((commit.incarnation for commit in state.commits), default=0)
    for name in known_names(paths.checkpoints) or ():
        writer = name.rpartition(".")[2]
        damaged = name.startswith(DAMAGED_PREFIX)
        old = writer.isdecimal() and int(writer) < (committed if damaged else state.incarnation)
        if old and name not in named:
            shutil.rmtree(paths.checkpoints / name, ignore_errors=True)
    for entry in paths.control.iterdir():
        number = entry.name.partition(".")[0]
        if number.isdecimal() and int(number) < state.incarnation:  # .nfs files have no number.
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                remove(entry)


def _end(master: Master, names: NameStore, events: EventWriter, failure: Failure) -> None:
    """Tell the agents that the incarnation has ended. After a hang, first collect the stacks."""
    if failure.cause not in HANGS or failure.agent:
        master.channel.end()
        return
    master.channel.end(stacks=failure.reason)
    taken = master.channel.collect_stacks(COLLECT_S)
    rows = [row for stacked in taken for row in stacked.ranks] or master.status.doing()
    files = [stacked.file for stacked in taken]
    publish_hang(names, events, master.writer.incarnation, rows, files)


def _fail(names: NameStore, incarnation: int, events: EventWriter, error: Exception) -> Failure:
    """Publish why this incarnation failed, unless another process has already done so."""
    if isinstance(error, RunFailedError | UsageError):
        logger.error("%s", error)
    else:
        traceback.print_exc()
    failure = failure_of(error, "master")
    events.write("failed", reason=failure.reason)
    publish(names, incarnation, failure)
    return failure


def explain_limit(paths: RunPaths, config: Config, ending: Ending) -> str:
    """Return how far a job got before its time limit, and which settings to change.

    The job reached its time limit before its first commit.
    """
    ready_s = next(
        (
            event["seconds"]
            for event in events.read_all(paths)
            if event["kind"] == "ready"
            and event["writer"] == f"master.{ending.incarnation}"
            and isinstance(event.get("seconds"), int | float)
        ),
        None,
    )
    slurm = config.cluster.slurm
    if ready_s is None:
        came = "the models were not loaded in time"
    else:
        came = f"starting and loading took {ready_s:.0f} s, and {_finished(paths)}"
    limit = f"cluster.slurm.time ({slurm.time})" if slurm.time else "cluster.slurm.time"
    return (
        f"{came}. A job must finish a step before Slurm's warning, and another step and its commit "
        f"within {slurm.signal_lead_s} s after the warning. "
        f"Raise {limit} or cluster.slurm.signal_lead_s, commit more often "
        "(checkpoint.every_steps), or make steps shorter"
    )


def _finished(paths: RunPaths) -> str:
    """Return how many steps the metrics have after the last commit, as part of a sentence.

    The metrics still have these steps, because only the next incarnation removes them.
    """
    commit = fold(History(paths.history).read()).last_commit
    newest = metrics.newest(metrics.read_latest(paths.metrics, 1)).get("step", 0)
    steps = int(newest) - (commit.step if commit is not None else 0)
    if steps <= 0:
        return "no step was finished in the remaining time"
    return f"{steps} steps were finished, but none was committed"


def main() -> int:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.master")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--job", required=True, help="the job that this incarnation runs in")
    parser.add_argument(PIPE_FD_OPTION, type=int, required=True)
    parser.add_argument(PULSE_OPTION, type=float, required=True, help="seconds between pulses")
    parser.add_argument(STACKS_OPTION, type=int, required=True)
    options = parser.parse_args()
    write_stacks_on_signal(options.stacks_fd)
    allow_tracing()
    calls.set_private_umask()
    drop_failed_output()
    log.configure("master")
    errand = Errand(stacks_wakeup(), lambda: finish_stacks(options.stacks_fd, ""))
    start_pulse(Connection.from_fd(options.pipe_fd), options.pulse_s, errand=errand)
    return serve(options.run, options.submission, options.job, env.LINK.get())


if __name__ == "__main__":
    sys.exit(main())
