"""Changes to the queued links of a live trial: top-up, and the use of excluded hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from slurmrl.desk.live import newest_jobs
from slurmrl.desk.submit import Submitted
from slurmrl.env import user_name
from slurmrl.plan.model import Plan
from slurmrl.run import hosts
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import Scheduler
from slurmrl.scheduler.chain import Chain, top_up, why_not
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.watch.snapshot import newest_submission


def add_links(paths: RunPaths, *, dry_run: bool = False) -> Submitted | None:
    """Extend the chains of a live trial that are short of links.

    Return None where no chain is: the trial has ended or must be resumed, has enough links, or is
    no chain of Slurm jobs. ``dry_run`` reports what would be queued and queues nothing.

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
    """Return the job that extends a chain, in words; empty where it is not extended."""
    if dry_run:
        reason = why_not(chain, scheduler, by=requester(), requested=True)
        return "" if reason else "one job array"
    outcome = top_up(chain, scheduler, by=requester(), requested=True)
    return f"job {outcome}" if isinstance(outcome, str) else ""


def include(
    paths: RunPaths, wanted: Sequence[str], *, dry_run: bool = False
) -> tuple[list[str], bool]:
    """Let present and future jobs of the trial use excluded hosts again (``all``: every one).

    Return the hosts, and whether the trial is live.

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
    """Return a name for this process as the claimant of an extension."""
    return f"{user_name()}@{socket.gethostname()}:{os.getpid()}"
