"""Submitting a trial: a new one, or one that ended or was interrupted.

The order makes every crash harmless: a submission exists once its request does, the
configuration is changed by its owner only, and job ids are found again by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmrl.config.load import load_resolved
from slurmrl.errors import ConfigError, Problem, UsageError
from slurmrl.fsio import atomic
from slurmrl.history.log import History
from slurmrl.history.record import Kind, Record
from slurmrl.history.state import TrialState, fold
from slurmrl.history.writer import resume
from slurmrl.monitor import sinks
from slurmrl.monitor.snapshot import submission_numbers
from slurmrl.paths import RunPaths, user_name
from slurmrl.plan import inventory
from slurmrl.plan.build import make_plan
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.recover import differences
from slurmrl.scheduler import choose, make
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.submission import trials
from slurmrl.submission.live import Jobs, clear_away, newest_jobs
from slurmrl.submission.prepare import is_prepared, prepare, rewrite, trial_uuid
from slurmrl.workers.pace import Pace


@dataclass(frozen=True)
class Proposal:
    """A trial that was checked and planned; nothing is written yet."""

    settings: Settings
    plan: Plan
    paths: RunPaths
    kind: str
    """The scheduler: ``local`` or ``slurm``."""

    @property
    def trial(self) -> str:
        return f"{self.paths.experiment}/{self.paths.trial}"

    def request(self, number: int, trial_id: str) -> SubmissionRequest:
        return SubmissionRequest(
            number=number,
            uuid=trial_id,
            trial=self.trial,
            run=self.paths,
            python=sys.executable,
            groups=tuple(
                GroupRequest(
                    name=group.name,
                    hosts=group.hosts,
                    workers_per_host=group.workers_per_host,
                    gpus_per_worker=group.gpus_per_worker,
                    cpus_per_worker=group.cpus_per_worker,
                    links=group.links,
                    elastic=group.elastic,
                )
                for group in self.plan.groups
            ),
            options=self.settings.config.cluster.model_dump(mode="json"),
        )

    def scripts(self) -> dict[str, str]:
        """The batch scripts, by group, of the next submission."""
        number = max(submission_numbers(self.paths), default=0) + 1
        known = trial_uuid(self.paths) if self.paths.identity.exists() else uuid.uuid4().hex
        return make(self.kind).scripts(self.request(number, known))


@dataclass(frozen=True)
class Submitted:
    """What came of it."""

    paths: RunPaths
    kind: str
    jobs: Jobs | None
    """None: the trial is complete, and nothing was submitted."""
    earlier: int = 0
    """Incarnations that the trial had before."""
    resumed_step: int | None = None
    """The commit that the trial goes on from; None for one that starts at the beginning."""

    @property
    def trial(self) -> str:
        return f"{self.paths.experiment}/{self.paths.trial}"

    @property
    def root(self) -> Path:
        return self.paths.run.parents[2]


def propose(
    config: Path,
    overrides: Sequence[str],
    *,
    root: str | None = None,
    scheduler: str | None = None,
    new: bool = False,
) -> Proposal:
    """Check a configuration file and plan its trial. ``new`` gives it a name that is free.

    Raises ConfigError with all problems.
    """
    chosen = trials.chosen_root(root)
    settings = load_settings(config, overrides, root=chosen)
    if new:
        name = _free_name(settings)
        settings = load_settings(config, [*overrides, f"trial={json.dumps(name)}"], root=chosen)
    return _planned(settings, scheduler)


def propose_resume(
    paths: RunPaths, overrides: Sequence[str], *, scheduler: str | None = None
) -> Proposal:
    """The trial of a run directory, with changes. Raises UsageError if it was never prepared."""
    if not is_prepared(paths):
        raise UsageError(
            f"{paths.experiment}/{paths.trial} was never submitted completely: submit it again"
        )
    settings = load_settings(paths.config, overrides, root=paths.run.parents[2])
    found = _paths(settings)
    if found != paths:
        raise UsageError("resume cannot rename a trial: submit the configuration with --new")
    return _planned(settings, scheduler)


def submit(proposal: Proposal) -> Submitted:
    """Write the run directory and start the jobs.

    Raises UsageError for a live trial and for one whose configuration differs, EnvironmentFailure
    where scheduler or directory do not work.
    """
    scheduler = make(proposal.kind)
    scheduler.check()
    sinks.check(proposal.settings.config.logging)
    proposal.scripts()  # what cannot be written into a script is refused before anything is
    state: TrialState = fold([])
    fresh = prepare(proposal.paths, proposal.settings, proposal.plan)
    if not fresh:
        state = _check_resumable(proposal)
        if _complete(proposal, state):
            return Submitted(proposal.paths, proposal.kind, None)
    number = _claim(proposal)
    if not fresh:
        rewrite(proposal.paths, proposal.settings, proposal.plan)
    if state.end is not None:
        resume(History(proposal.paths.history), {"submission": number})
    ids = scheduler.submit(proposal.request(number, trial_uuid(proposal.paths)))
    jobs = Jobs(number, scheduler, ids)
    _refuse_if_overtaken(proposal, jobs)
    step = state.last_commit.step if state.last_commit else None
    return Submitted(proposal.paths, proposal.kind, jobs, state.incarnation, step)


def _planned(settings: Settings, scheduler: str | None) -> Proposal:
    """The resolved configuration says which scheduler was chosen in the end."""
    config = settings.config
    kind = choose(scheduler or config.cluster.scheduler)
    cluster = config.cluster.model_copy(update={"scheduler": kind})
    config = config.model_copy(update={"cluster": cluster})
    settings = dataclasses.replace(settings, config=config)
    plan = make_plan(settings, scheduler=kind)
    if kind == "slurm":
        lacking = inventory.lacking(plan, settings.config, inventory.ask(settings.config))
        if lacking:
            where = str(settings.source.path)
            raise ConfigError(tuple(Problem(where, "cluster", text) for text in lacking))
    return Proposal(settings, plan, _paths(settings), kind)


def _paths(settings: Settings) -> RunPaths:
    config = settings.config
    return RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)


def _free_name(settings: Settings) -> str:
    here = _paths(settings)
    return trials.next_free(
        here.trial, lambda name: RunPaths(here.run.with_name(name)).run.exists()
    )


def _check_resumable(proposal: Proposal) -> TrialState:
    """Refuse a live trial, and one whose configuration differs; clear away what an ended one
    left."""
    state = fold(History(proposal.paths.history).read())
    jobs = newest_jobs(proposal.paths)
    active = jobs.active() if jobs else []
    if active and state.end is None:
        name = proposal.trial
        raise UsageError(
            f"{name} is live (job {active[0].job_id}, {active[0].state}): see slurmrl status "
            f"{name}, end it with slurmrl cancel {name}, or start another trial with --new"
        )
    changed = differences(load_resolved(proposal.paths.config), proposal.settings.config)
    if changed:
        lines = "".join(f"\n  {line}" for line in changed)
        raise UsageError(
            f"{proposal.trial} exists with another configuration; use --new, or undo:{lines}"
        )
    if jobs and active:
        clear_away(jobs)
    return state


def _complete(proposal: Proposal, state: TrialState) -> bool:
    """Whether the trial finished, and would finish at once if it were resumed."""
    end: Record | None = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return False
    config = proposal.settings.config
    before = load_resolved(proposal.paths.config)
    at_end = end.data["step"] >= config.total_steps
    return at_end or (end.data["reason"] != "total_steps" and config.stop_when == before.stop_when)


def _claim(proposal: Proposal) -> int:
    """Take the next submission. Raises UsageError if somebody else is taking it."""
    number = max(submission_numbers(proposal.paths), default=0) + 1
    hosts = sum(group.hosts for group in proposal.plan.groups)
    request = {
        "scheduler": proposal.kind,
        "total_steps": proposal.settings.config.total_steps,
        "heartbeat_s": Pace.of(hosts, proposal.settings.config.cluster.heartbeat_s).beat_s,
        "nonce": uuid.uuid4().hex,
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    atomic.make_private_directory(proposal.paths.submission(number))
    if not atomic.exclusive_create(
        proposal.paths.submission_request(number), json.dumps(request).encode()
    ):
        raise UsageError(f"{proposal.trial} is being submitted by somebody else at this moment")
    return number


def _refuse_if_overtaken(proposal: Proposal, jobs: Jobs) -> None:
    """Somebody who looked before our jobs were there may have submitted after us: then our jobs
    would leave by themselves; they are taken back at once."""
    if max(submission_numbers(proposal.paths)) > jobs.number:
        jobs.scheduler.cancel(jobs.ids)
        raise UsageError(f"{proposal.trial} was submitted by somebody else at the same moment")
