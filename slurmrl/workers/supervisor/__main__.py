"""Run ``python -m slurmrl.workers.supervisor --run RUN --submission N --group G --launcher L``.

This command replaces the batch script's shell, so it receives Slurm's signals to the batch process.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from slurmrl import env, log
from slurmrl.backoff import retry
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Cluster
from slurmrl.errors import (
    ConfigError,
    CorruptFileError,
    OwnershipError,
    RunGoneError,
    SlurmrlError,
    UsageError,
)
from slurmrl.fsio import calls, inputs
from slurmrl.fsio.atomic import is_absent
from slurmrl.name_resolve.store import NameStore
from slurmrl.plan.model import Plan
from slurmrl.run.events import EventWriter
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.chain import TIMEOUT_S, Link, Upkeep, continue_after, end_chain, give_back
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import ElasticGroup, SlurmScheduler
from slurmrl.scheduler.submission import is_orphaned
from slurmrl.watch import overview
from slurmrl.workers.link import LeaderLock, end_as_failed, reason_to_leave, wait_for_turn
from slurmrl.workers.supervisor.checkpoint_evaluations import (
    CheckpointEvaluations,
    hand_over_results,
)
from slurmrl.workers.supervisor.end_of_trial import announce, write_report
from slurmrl.workers.supervisor.rounds import JobHosts, Rounds, job_tag
from slurmrl.workers.supervisor.watcher import Watchers

logger = log.get(__name__)

PREPARE_S = 300.0
"""Timeout for reading the run's files. The waiting job occupies hosts."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slurmrl.workers.supervisor", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--submission", type=int, required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--launcher", choices=("srun", "direct"), default="direct")
    parser.add_argument("--failed", metavar="REASON", help="start nothing: end the trial as FAILED")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    calls.set_private_umask()
    log.configure(f"supervisor {options.group}")
    paths = RunPaths(options.run)
    watchers = Watchers(options)
    try:
        return run(options, paths, watchers)
    except CorruptFileError as error:
        logger.error("this job cannot continue: %s", error)
        return 1
    finally:
        if options.group == TRAINERS:
            overview.keep_overview(paths)
            announce(paths)
            write_report(paths)
            hand_over_results(paths)  # Do this last: it may take minutes.
        watchers.end()


def run(options: argparse.Namespace, paths: RunPaths, watchers: Watchers) -> int:
    """Run this job; return its exit code."""
    link = Link.here(paths, options.submission, options.group)
    in_chain = options.launcher == "srun"
    reason = reason_to_leave(paths, options.submission)
    if reason is not None:
        logger.info("nothing to do: %s", reason)
        if in_chain:
            end_chain(link)  # The process that ended the trial may have died before this.
        return 0
    if options.failed is not None:
        cannot_begin(link, UsageError(options.failed), in_chain=in_chain)
        return 0
    logger.info("this is link %d, job %s", link.index, env.JOB_ID.get())
    try:
        rounds = retry("read the run's files", lambda: prepare(options, paths), timeout_s=PREPARE_S)
    except SlurmrlError as error:
        return cannot_begin(link, error, in_chain=in_chain)
    watchers.start(rounds.allocation)
    try:
        return run_link(link, rounds) if in_chain else run_rounds(rounds)
    except RunGoneError as error:
        logger.error("%s", error)
        if in_chain:
            end_chain(link)  # Without the run directory, queued links have nothing to do.
        return 1


def run_rounds(rounds: Rounds) -> int:
    """Run the rounds of a job. In the trainers' job, also submit evaluations of checkpoints."""
    options = rounds.options
    if options.group != TRAINERS:
        return rounds.run()
    kind = "local" if options.launcher == "direct" else "slurm"
    evaluations = CheckpointEvaluations(
        rounds.paths, kind, lambda event, data: rounds.events.write(event, **data)
    )
    evaluations.start()
    code = rounds.run()
    evaluations.stop(ended=reason_to_leave(rounds.paths, options.submission) is not None)
    return code


def prepare(options: argparse.Namespace, paths: RunPaths) -> Rounds:
    """Prepare the rounds. Raises EnvironmentFailure, and UsageError for errors of the user."""
    cluster = load_resolved(paths.config).cluster
    os.environ.update(cluster.env)  # Agents and workers inherit the variables.
    if file := cluster.variables_file:
        os.environ.update(read_variables(Path(file)))
    group = Plan.read(paths.plan).group(options.group)
    return Rounds(options, paths, JobHosts.of_this_job(options, paths), group.tasks_per_host)


def read_variables(file: Path) -> dict[str, str]:
    """Return the variables in ``file``.

    Raises UsageError for errors that the user must fix, and EnvironmentFailure for errors of this
    host. The host may lack a mount or map users differently.
    """
    try:
        return inputs.read_variables(file)
    except OwnershipError as error:
        if file.stat().st_uid != os.geteuid():
            raise
        raise UsageError(f"cluster.variables_file: {error}") from error
    except UsageError as error:
        raise UsageError(f"cluster.variables_file: {error}") from error


def cannot_begin(link: Link, error: SlurmrlError, *, in_chain: bool) -> int:
    """Leave a job whose preparation failed; return the exit code.

    A user error ends the trial. After any other error, requeue the link, because this host may be
    the cause.
    """
    logger.error("this job cannot start: %s", error)
    events = EventWriter(link.run, f"supervisor.{link.group}.{job_tag()}")
    user_error = isinstance(error, UsageError) or was_removed(link.run)
    if user_error and in_chain and not takes_over(link, events):
        return 0
    events.write("end", code=1, why=f"it could not begin: {error}")
    if user_error:
        end_as_failed(link.run, link.submission, str(error))
        if in_chain:
            end_chain(link)
    elif in_chain:
        give_back(link, f"the run's files cannot be read: {error}", env.NODE_NAME.get())
    return 1


def was_removed(paths: RunPaths) -> bool:
    """Return whether the file in ``cluster.variables_file`` was certainly removed."""
    try:
        file = load_resolved(paths.config).cluster.variables_file
    except SlurmrlError:
        return False
    return file is not None and is_absent(Path(file))


def run_link(link: Link, rounds: Rounds) -> int:
    """Run the rounds of a Slurm job, then prepare the next link; return the rounds' exit code.

    During the rounds, a thread looks after the other jobs of the trial (`Upkeep`).
    """
    jobs = Plan.read(link.run.plan).jobs
    elastic = {group.name: group.hosts for group in jobs if group.elastic}
    if link.group in elastic:
        return run_task(link, rounds)  # The trainers' job looks after the jobs of this group.
    if not takes_over(link, rounds.events):
        return 0
    upkeep = Upkeep(link, elastic, lambda job: rounds.events.write("topped_up", job=job))
    upkeep.start()
    code = run_rounds(rounds)
    at_rest = upkeep.stop()
    if reason_to_leave(link.run, link.submission) is not None:
        end_chain(link)
    elif rounds.began or rounds.warned:
        after = continue_after(link, extend=at_rest, lost_host=rounds.lost_host)
        logger.info("after this job: %s", after)
    else:
        give_back(link, *rounds.failed_start())
    return code


def run_task(link: Link, rounds: Rounds) -> int:
    """Run a task of an elastic group; return the exit code.

    Without trainers, hold the queued tasks afterwards until a job of the trainers runs again.
    """
    code = rounds.run()
    try:
        if is_orphaned(link.run, link.group):
            client = SlurmClient(TIMEOUT_S)
            group = ElasticGroup(link.run, link.submission, link.group, client, by=link.element)
            group.leave_alone()
    except SlurmrlError as error:
        logger.info("cannot hold the queued tasks: %s", error)
    return code


def takes_over(link: Link, events: EventWriter) -> bool:
    """Wait for the leader lock; return whether this job must run the trial."""
    scheduler = SlurmScheduler(SlurmClient(TIMEOUT_S))
    names = NameStore(link.run.names)
    ttl_s, host = lease_ttl_s(link.run), env.NODE_NAME.get()
    lock = LeaderLock(link.run, names, link, job_tag(), host, scheduler, lease_ttl_s=ttl_s)
    return wait_for_turn(lock, link, scheduler, events)


def lease_ttl_s(paths: RunPaths) -> float:
    """Return ``cluster.lease_ttl_s``, or its default if the configuration is damaged."""
    try:
        return load_resolved(paths.config).cluster.lease_ttl_s
    except ConfigError:
        return Cluster().lease_ttl_s


if __name__ == "__main__":
    sys.exit(main())
