"""Changes to the jobs of a live trial: more links, excluded hosts, the number of rollout tasks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from slurmrl.config.load import load_resolved
from slurmrl.desk.submitting import Submitted
from slurmrl.desk.trial_jobs import Jobs, newest_jobs
from slurmrl.env import user_name
from slurmrl.errors import SchedulerError, UsageError
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run import hosts
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.base import Scheduler
from slurmrl.scheduler.chain import Chain, top_up, why_not
from slurmrl.scheduler.slurm import ElasticGroup, SlurmScheduler
from slurmrl.scheduler.submission import newest_submission, set_wanted_tasks, wanted_tasks

IDLE = "no job of the trial is queued or running: the number applies after slurmrl resume"
WITHIN_SECONDS = "the local chain applies the number within seconds"
FOLLOWS = "the trainers' job applies the number within a minute"


@dataclass(frozen=True)
class Scaled:
    """A change of the number of tasks that may run at once."""

    tasks: int
    before: int
    note: str
    """Description of when the change takes effect; empty for an immediate effect."""


def add_links(paths: RunPaths, *, dry_run: bool = False) -> Submitted | None:
    """Extend the chains of a live trial that are short of links.

    Return None if nothing was added: the trial has ended or must be resumed, has enough links, or
    has no chain of Slurm jobs. With ``dry_run``, only report the number of new jobs.

    Raises UsageError, SchedulerError.
    """
    submission, jobs = newest_submission(paths), newest_jobs(paths)
    if submission is None or submission.scheduler != "slurm" or jobs is None:
        return None
    groups = [group.name for group in Plan.read(paths.plan).groups if not group.elastic]
    chains = [Chain(paths, jobs.number, group) for group in groups]
    added = {chain.group: _add(chain, jobs.scheduler, dry_run=dry_run) for chain in chains}
    words = ", ".join(f"{group}: {job}" for group, job in added.items() if job)
    if not words:
        return None
    done = "more would be added to its chain" if dry_run else "more were added to its chain"
    note = f"the trial is live and has few links left: {done} ({words})"
    return Submitted(paths, submission.scheduler, newest_jobs(paths), notes=(note,))


def _add(chain: Chain, scheduler: Scheduler, *, dry_run: bool) -> str:
    """Extend a chain; return a description of the new job. Return "" if nothing was added."""
    if dry_run:
        reason = why_not(chain, scheduler, by=requester(), requested=True)
        return "" if reason else "one job array"
    outcome = top_up(chain, scheduler, by=requester(), requested=True)
    return f"job {outcome}" if isinstance(outcome, str) else ""


def include(
    paths: RunPaths, wanted: Sequence[str], *, dry_run: bool = False
) -> tuple[list[str], bool]:
    """Let present and future jobs of the trial use excluded hosts again.

    ``wanted`` names the hosts; ``all`` stands for all excluded hosts. Return the hosts, and whether
    the trial has active jobs.

    Raises UsageError for a host that is not excluded, SchedulerError.
    """
    chosen = hosts.chosen(paths, wanted)
    jobs = newest_jobs(paths)
    active = jobs.active() if jobs else []
    live = bool(active) and fold(History(paths.history).read()).end is None
    if dry_run:
        return chosen, live
    hosts.include(paths, chosen)
    if live and jobs is not None and isinstance(jobs.scheduler, SlurmScheduler):
        for group in {task.group for task in active}:
            jobs.scheduler.keep_off(paths, jobs.number, group, by=requester())
    return chosen, live


def requester() -> str:
    """Return the name under which this process claims an extension."""
    return f"{user_name()}@{socket.gethostname()}:{os.getpid()}"


def set_tasks(paths: RunPaths, tasks: int) -> Scaled:
    """Set the number of rollout tasks of a trial, for all of its later links and submissions.

    0 pauses generation. The trial's master tells surplus tasks to exit.

    Raises UsageError for a trial without rollout tasks, for a trial that has ended, and for a
    number that the trial does not allow.
    """
    name = paths.full_name
    settings = load_resolved(paths.config).rollout.tasks
    if settings is None:
        raise UsageError(f"{name} has no rollout tasks (rollout.tasks): its trainers generate")
    end = fold(History(paths.history).read()).end
    if end is not None:
        raise UsageError(f"{name} has ended ({end.kind}): slurmrl resume {name} continues it")
    plan = Plan.read(paths.plan)
    group = plan.group(ROLLOUTS)
    if group not in plan.jobs:
        raise UsageError(
            f"the rollout tasks of {name} use GPUs of its trainers' job (rollout.gpus): their "
            "number is fixed"
        )
    if tasks > group.links:
        raise UsageError(
            f"{tasks} tasks are not allowed: the array of {name} has {group.links} elements; raise "
            f"rollout.slurm.links or rollout.tasks.max when you resume it"
        )
    if 0 < tasks < settings.min:
        raise UsageError(
            f"{tasks} tasks are not allowed: rollout.tasks.min is {settings.min}; 0 pauses "
            "generation"
        )
    before = wanted_tasks(paths, ROLLOUTS, group.hosts)
    set_wanted_tasks(paths, ROLLOUTS, tasks, group.hosts)
    jobs = newest_jobs(paths)
    return Scaled(tasks, before, IDLE if jobs is None else _apply(paths, jobs, tasks))


def _apply(paths: RunPaths, jobs: Jobs, tasks: int) -> str:
    """Apply the number of tasks; return when it takes effect, "" for an immediate effect."""
    if not any(task.group == TRAINERS for task in jobs.active()):
        return IDLE
    if not isinstance(jobs.scheduler, SlurmScheduler):
        return WITHIN_SECONDS
    try:
        ElasticGroup(paths, jobs.number, ROLLOUTS, by=requester()).keep(tasks)
    except (SchedulerError, UsageError) as error:
        return f"{FOLLOWS}, because Slurm's commands fail here: {error}"
    return ""
