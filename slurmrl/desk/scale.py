"""The number of rollout tasks of a trial, as its user changes it."""

from __future__ import annotations

from dataclasses import dataclass

from slurmrl.config.load import load_resolved
from slurmrl.desk.links import requester
from slurmrl.desk.live import Jobs, newest_jobs
from slurmrl.errors import SchedulerError, UsageError
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import ROLLOUTS
from slurmrl.run import demand
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler.elastic import ElasticGroup
from slurmrl.scheduler.slurm import SlurmScheduler

IDLE = "no job of the trial waits or runs: the number holds once it is resumed"
WITHIN_SECONDS = "the local chain follows within seconds"
FOLLOWS = "the trainers' job follows within a minute"


@dataclass(frozen=True)
class Scaled:
    """The new number of tasks that may run at once."""

    tasks: int
    before: int
    note: str
    """When it takes effect, if that is not now."""


def set_tasks(paths: RunPaths, tasks: int) -> Scaled:
    """Set the number of rollout tasks of a trial, for all of its later links and submissions.

    0 pauses generation. The trial's master tells surplus tasks to exit.

    Raises UsageError for a trial without such tasks, for a trial that has ended, and for a number
    that the trial does not allow.
    """
    name = f"{paths.experiment}/{paths.trial}"
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
            f"the rollout tasks of {name} have GPUs of its trainers' job (rollout.gpus): their "
            "number is fixed"
        )
    if tasks > group.links:
        raise UsageError(
            f"{tasks} tasks are not allowed: the array of {name} has {group.links}; raise "
            f"rollout.slurm.links or rollout.tasks.max when you resume it"
        )
    if 0 < tasks < settings.min:
        raise UsageError(
            f"{tasks} tasks are not allowed: rollout.tasks.min is {settings.min}; 0 pauses "
            "generation"
        )
    before = demand.wanted_tasks(paths, ROLLOUTS, group.hosts)
    demand.set_wanted_tasks(paths, ROLLOUTS, tasks, group.hosts)
    jobs = newest_jobs(paths)
    return Scaled(tasks, before, IDLE if jobs is None else _apply(paths, jobs, tasks))


def _apply(paths: RunPaths, jobs: Jobs, tasks: int) -> str:
    """Let the scheduler start this many. Return when it does so, if that is not now."""
    if not any(task.group == TRAINERS for task in jobs.active()):
        return IDLE
    if not isinstance(jobs.scheduler, SlurmScheduler):
        return WITHIN_SECONDS
    try:
        ElasticGroup(paths, jobs.number, ROLLOUTS, by=requester()).keep(tasks)
    except (SchedulerError, UsageError) as error:
        return f"{FOLLOWS}, because Slurm's commands fail here: {error}"
    return ""
