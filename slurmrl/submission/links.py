"""More links for a trial that lives and has few left."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from slurmrl.config.load import load_resolved
from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.monitor.snapshot import newest_submission
from slurmrl.paths import RunPaths, user_name
from slurmrl.plan.model import Plan
from slurmrl.scheduler import hosts
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.succession import FEW, successors
from slurmrl.submission.live import newest_jobs
from slurmrl.submission.submit import Submitted


def add_links(paths: RunPaths, *, dry_run: bool = False) -> Submitted | None:
    """Queue another array behind the links of a live trial; None where that is not the case: it has
    ended or waits for a resume, has enough links left, or is no chain of Slurm jobs. ``dry_run``:
    say so and queue nothing.

    Raises UsageError, SchedulerError.
    """
    submission = newest_submission(paths)
    if submission is None or submission.scheduler != "slurm" or not _is_chain(paths):
        return None
    if fold(History(paths.history).read()).end is not None:
        return None
    jobs = newest_jobs(paths)
    active = jobs.active() if jobs else []
    short = [
        group.name
        for group in Plan.read(paths.plan).groups
        if not group.elastic
        and any(task.group == group.name for task in active)
        and len(successors(active, group.name)) < FEW
    ]
    if jobs is None or not short:
        return None
    if dry_run:
        note = f"it is live and has few links left; more would be queued ({', '.join(short)})"
        return Submitted(paths, submission.scheduler, jobs, notes=(note,))
    me = f"{user_name()}@{socket.gethostname()}:{os.getpid()}"
    added = {name: jobs.scheduler.extend(paths, jobs.number, name, by=me) for name in short}
    words = ", ".join(f"{name}: job {job}" for name, job in added.items())
    note = f"it is live and had few links left; more were queued behind them ({words})"
    return Submitted(paths, submission.scheduler, newest_jobs(paths), notes=(note,))


def include(
    paths: RunPaths, wanted: Sequence[str], *, dry_run: bool = False
) -> tuple[list[str], bool]:
    """Let jobs of the trial use hosts again that they avoid (``all``: each of them), those in the
    queue too. Returns the hosts, and whether the trial is live.

    Raises UsageError for a host that is not avoided, SchedulerError.
    """
    chosen = hosts.chosen(paths, wanted)
    jobs = newest_jobs(paths)
    active = jobs.active() if jobs else []
    live = bool(active) and fold(History(paths.history).read()).end is None
    if dry_run:
        return chosen, live
    hosts.include(paths, chosen)
    if live and jobs is not None and isinstance(jobs.scheduler, SlurmScheduler):
        me = f"{user_name()}@{socket.gethostname()}:{os.getpid()}"
        for group in {task.group for task in active}:
            jobs.scheduler.keep_off(paths, jobs.number, group, by=me)
    return chosen, live


def _is_chain(paths: RunPaths) -> bool:
    return Continue(load_resolved(paths.config).cluster.slurm.continue_) is Continue.CHAIN
