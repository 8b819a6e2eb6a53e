"""Submitting a trial: a new one, or one that ended or was interrupted.

The order makes every crash harmless: a submission exists once its request does, the
configuration is changed by its owner only, and job ids are found again by name.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config
from slurmrl.errors import ConfigError, Problem, UsageError
from slurmrl.fsio import space, variables
from slurmrl.history.log import History
from slurmrl.history.record import Kind, Record
from slurmrl.history.state import TrialState, fold
from slurmrl.history.writer import resume
from slurmrl.monitor import sinks
from slurmrl.monitor.snapshot import submission_numbers
from slurmrl.paths import RunPaths, user_name
from slurmrl.plan.build import make_plan
from slurmrl.plan.checks import inventory
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.recover import (
    consequences,
    differences,
    follow_actor,
    may_change,
    moved_schedules,
)
from slurmrl.scheduler import choose, make
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.submission import claims, own_code, snapshot, trials
from slurmrl.submission.checks.finding import Finding
from slurmrl.submission.checks.run import Code, check
from slurmrl.submission.live import Jobs, clear_away, newest_jobs
from slurmrl.submission.prepare import is_prepared, prepare, rewrite, trial_uuid
from slurmrl.submission.record import ProvenanceWriter, recorded_folders
from slurmrl.workers.poll_intervals import PollIntervals

logger = log.get(__name__)


@dataclass(frozen=True)
class Proposal:
    """A trial that was checked and planned; nothing is written yet."""

    settings: Settings
    plan: Plan
    paths: RunPaths
    kind: str
    """The scheduler: ``local`` or ``slurm``."""
    recorder: ProvenanceWriter
    """The code that a snapshot would be taken of."""
    update_code: bool = False
    """Take a new snapshot although there is one."""

    @property
    def trial(self) -> str:
        return f"{self.paths.experiment}/{self.paths.trial}"

    def request(self, number: int, trial_id: str, code: int) -> SubmissionRequest:
        """``code`` is the number of the snapshot that the jobs run."""
        return SubmissionRequest(
            snapshot=code,
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
                    spares=self.settings.config.cluster.slurm.spares,
                )
                for group in self.plan.groups
            ),
            options=self.settings.config.cluster.model_dump(mode="json"),
        )

    def scripts(self) -> dict[str, str]:
        """The batch scripts, by group, of the next submission."""
        number = max(submission_numbers(self.paths), default=0) + 1
        known = trial_uuid(self.paths) if self.paths.identity.exists() else uuid.uuid4().hex
        code = snapshot.following if self.update_code else snapshot.current
        return make(self.kind).scripts(self.request(number, known, code(self.paths)))

    def check(self, timeout_s: float) -> list[Finding]:
        """Look at everything that the run will read (see `checks.run`)."""
        code = Code(paths=self.recorder.code.paths)
        if is_prepared(self.paths) and not self.update_code:
            code = Code(self.paths.snapshot(snapshot.current(self.paths)))
        return check(self.settings, code, timeout_s=timeout_s)


@dataclass(frozen=True)
class Outlook:
    """Where a trial stands that may be submitted again."""

    state: TrialState
    complete: bool
    """It finished, and would finish at once."""
    left: Jobs | None
    """What it has left in the queue although it has ended."""
    notes: tuple[str, ...] = ()
    """What would be otherwise than before, and what that means."""

    @property
    def step(self) -> int | None:
        """The commit that it would go on from."""
        return self.state.last_commit.step if self.state.last_commit else None


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
    notes: tuple[str, ...] = ()
    """What is otherwise than before, and what that means."""

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
    code = _own_code(settings, [config.parent.absolute(), Path.cwd()])
    return _planned(
        settings, scheduler, code, update_code=_needs_other_code(_paths(settings), settings.config)
    )


def propose_resume(
    paths: RunPaths,
    overrides: Sequence[str],
    *,
    scheduler: str | None = None,
    update_code: bool = False,
) -> Proposal:
    """The trial of a run directory, with changes. ``update_code`` runs the code as it is now and
    not that of the newest submission. Raises UsageError if the trial was never prepared."""
    if not is_prepared(paths):
        raise UsageError(
            f"{paths.experiment}/{paths.trial} was never submitted completely: submit it again"
        )
    before = load_resolved(paths.config)
    overrides = follow_actor(before, overrides)
    settings = load_settings(paths.config, overrides, root=paths.run.parents[2])
    found = _paths(settings)
    if found != paths:
        raise UsageError("resume cannot rename a trial: submit the configuration with --new")
    if not update_code:
        if settings.config.code != before.code:
            raise UsageError("code: the trial keeps the code that it has; add --update-code")
        if _reward(settings.config) != _reward(before) and ":" in _reward(settings.config):
            raise UsageError(
                "reward.name: the trial has the code of the reward before; add --update-code"
            )
        return _planned(settings, scheduler, own_code.OwnCode())
    folders = [*recorded_folders(paths.snapshot(snapshot.current(paths))), Path.cwd()]
    code = _own_code(settings, list(dict.fromkeys(folders)))
    return _planned(settings, scheduler, code, update_code=True)


def submit(proposal: Proposal) -> Submitted:
    """Write the run directory and start the jobs.

    Raises UsageError for a live trial and for one whose configuration differs, EnvironmentFailure
    where scheduler or directory do not work.
    """
    scheduler = make(proposal.kind)
    scheduler.check()
    sinks.check(proposal.settings.config.logging)
    if file := proposal.settings.config.cluster.variables_file:
        variables.read(Path(file))
    space.require(proposal.paths.run)
    proposal.scripts()  # what cannot be written into a script is refused before anything is
    outlook = Outlook(fold([]), complete=False, left=None)
    fresh = prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    before = 0
    if not fresh:
        before = claims.newest(proposal.paths)
        outlook = look(proposal)
    if outlook.left is not None:
        clear_away(outlook.left)
    if outlook.complete:
        return Submitted(proposal.paths, proposal.kind, None)
    state, notes = outlook.state, outlook.notes
    code = _snapshot(proposal)
    number = claims.claim(proposal.paths, before, _request(proposal, code))
    if proposal.update_code:
        notes += (f"runs the code of now: {proposal.paths.snapshot(code)}",)
    if not fresh:
        rewrite(proposal.paths, proposal.settings, proposal.plan)
    if state.end is not None:
        resume(History(proposal.paths.history), {"submission": number})
    ids = scheduler.submit(proposal.request(number, trial_uuid(proposal.paths), code))
    jobs = Jobs(number, scheduler, ids)
    claims.confirm(proposal.paths, jobs)
    return Submitted(proposal.paths, proposal.kind, jobs, state.incarnation, outlook.step, notes)


def look(proposal: Proposal) -> Outlook:
    """Where the trial of a run directory stands; changes nothing. Raises UsageError for a live one,
    one whose configuration differs and one that has another slurmrl."""
    state = fold(History(proposal.paths.history).read())
    left = _jobs_left(proposal, state)
    before = load_resolved(proposal.paths.config)
    changed = differences(before, proposal.settings.config)
    if changed and state.last_commit is not None:
        lines = "".join(f"\n  {line}" for line in changed)
        raise UsageError(
            f"{proposal.trial} exists with another configuration; use --new, or undo:{lines}\n"
            f"A trial goes on with another: {may_change()}"
        )
    if _complete(proposal, state):
        return Outlook(state, complete=True, left=left)
    _check_code(proposal)
    commit = state.last_commit
    if commit is not None:
        notes = _notes(before, proposal.settings, commit.step)
    else:
        notes = [f"starts at the beginning with {line}" for line in changed]
    return Outlook(state, complete=False, left=left, notes=tuple(notes))


def _notes(before: Config, settings: Settings, step: int) -> list[str]:
    """What goes on otherwise than before behind the commit of ``step``."""
    algorithm = settings.algorithm
    return [
        *consequences(before, settings.config),
        *moved_schedules(
            before,
            settings.config,
            trained=[use.role for use in algorithm.roles() if use.trained],
            step=step,
            optimizer_steps=algorithm.optimizer_steps,
        ),
    ]


def _reward(config: Config) -> str:
    return config.reward.name if config.reward is not None else ""


def _needs_other_code(paths: RunPaths, config: Config) -> bool:
    """Whether a trial exists that has nothing to go on from, and whose configuration names other
    code now."""
    if not is_prepared(paths) or fold(History(paths.history).read()).last_commit is not None:
        return False
    before = load_resolved(paths.config)
    return (config.code, _reward(config)) != (before.code, _reward(before))


def _own_code(settings: Settings, folders: Sequence[Path]) -> own_code.OwnCode:
    code = own_code.find(settings.config, settings.source, folders)
    for note in code.notes:
        logger.warning("%s", note)
    return code


def _planned(
    settings: Settings,
    scheduler: str | None,
    code: own_code.OwnCode,
    *,
    update_code: bool = False,
) -> Proposal:
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
    recorder = ProvenanceWriter(config, settings.source.path, code, kind)
    return Proposal(settings, plan, _paths(settings), kind, recorder, update_code)


def _paths(settings: Settings) -> RunPaths:
    config = settings.config
    return RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)


def _free_name(settings: Settings) -> str:
    here = _paths(settings)
    return trials.next_free(
        here.trial, lambda name: RunPaths(here.run.with_name(name)).run.exists()
    )


def _check_code(proposal: Proposal) -> None:
    """The jobs read what we write with the trial's own code: it has to be ours."""
    code = proposal.paths.snapshot(snapshot.current(proposal.paths))
    if not proposal.update_code and not snapshot.is_this_code(code):
        name = proposal.trial
        raise UsageError(
            f"{name} was submitted with another slurmrl ({code}): slurmrl resume {name} goes on "
            f"with that, slurmrl resume {name} --update-code with this one"
        )


def _jobs_left(proposal: Proposal, state: TrialState) -> Jobs | None:
    """Jobs that an ended trial has left; a live one is refused."""
    jobs = newest_jobs(proposal.paths)
    active = jobs.active() if jobs else []
    if active and state.end is None:
        name = proposal.trial
        raise UsageError(
            f"{name} is live (job {active[0].job_id}, {active[0].state}): see slurmrl status "
            f"{name}, end it with slurmrl cancel {name}, or start another trial with --new"
        )
    return jobs if active else None


def _complete(proposal: Proposal, state: TrialState) -> bool:
    """Whether the trial finished, and would finish at once if it were resumed."""
    end: Record | None = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return False
    config = proposal.settings.config
    before = load_resolved(proposal.paths.config)
    at_end = end.data["step"] >= config.total_steps
    return at_end or (end.data["reason"] != "total_steps" and config.stop_when == before.stop_when)


def _snapshot(proposal: Proposal) -> int:
    """The snapshot of code that the next submission runs. A new one counts from the moment when
    the submission's request names it."""
    if not proposal.update_code:
        return snapshot.current(proposal.paths)
    return snapshot.add(proposal.paths, proposal.recorder.code, proposal.recorder)


def _request(proposal: Proposal, code: int) -> dict[str, Any]:
    """What a submission's request says of it."""
    config = proposal.settings.config
    hosts = sum(group.hosts for group in proposal.plan.groups)
    lead_s = config.cluster.slurm.signal_lead_s if proposal.kind == "slurm" else None
    return {
        "scheduler": proposal.kind,
        "snapshot": code,
        "continue": config.cluster.slurm.continue_,
        "total_steps": config.total_steps,
        "heartbeat_s": PollIntervals.of(hosts, config.cluster.heartbeat_s).beat_s,
        "signal_lead_s": lead_s,
    }
