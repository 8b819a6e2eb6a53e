"""Submission of a new, ended or interrupted trial.

The order of the steps makes every crash harmless. A submission exists once its request exists. Only
the process with the claim changes the configuration. Job ids can be found again by job name.

A claim is the exclusive right to submit: it is the request file of the next submission number. A
process reads the newest number before it checks the trial's jobs. If another process submits in
between, the first process cannot create the file of the next number, or it finds a request without
jobs. A submission that the scheduler rejects leaves no files.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl.algorithms.offline_schema import Evaluate
from slurmrl.config.changes import consequences, differences, may_change, moved_schedules
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config
from slurmrl.desk import trial_code
from slurmrl.desk.proposal import (
    Proposal,
    begun_configuration,
    check_owner,
    free_name,
    identify,
    is_prepared,
    prepare,
    rewrite,
    run_paths,
    trial_uuid,
)
from slurmrl.desk.trial_jobs import Jobs, clear_away, newest_jobs, remove
from slurmrl.errors import SchedulerError, TrialEndedError, UsageError
from slurmrl.fsio import atomic, calls, documents
from slurmrl.plan.settings import Settings, with_present_defaults
from slurmrl.run.history.slots import END_OF_DATASET, History, Kind, Record
from slurmrl.run.history.state import TrialState, end, fold, resume
from slurmrl.run.paths import DAMAGED_PREFIX, RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.scheduler import make
from slurmrl.scheduler.base import JobIds, Scheduler
from slurmrl.scheduler.client import may_have_worked
from slurmrl.scheduler.submission import Claimant, claimant_words, may_submit, newest_submission
from slurmrl.workers.polling import PollIntervals


@dataclass(frozen=True)
class Outlook:
    """The state of a trial that may be submitted again."""

    state: TrialState
    complete: bool
    """Whether the trial has finished, and would finish at once if it were submitted again."""
    left: Jobs | None
    """Remaining jobs of the trial, none of which trains. The submission replaces these jobs."""
    submission: int = 0
    """Number of the newest submission."""
    notes: tuple[str, ...] = ()
    """Changes of the configuration, and their consequences."""

    @property
    def step(self) -> int | None:
        """Step of the commit from which the trial would resume; None without a commit."""
        return self.state.last_commit.step if self.state.last_commit else None

    @property
    def exhausted(self) -> bool:
        """Whether the trial was a single pass that reached the end of its dataset."""
        end = self.state.end
        return end is not None and end.data.get("reason") == END_OF_DATASET


@dataclass(frozen=True)
class Submitted:
    """The result of a submission."""

    paths: RunPaths
    kind: str
    jobs: Jobs | None
    """The submitted jobs; None if the trial is complete and nothing was submitted."""
    earlier: int = 0
    """Number of earlier incarnations of the trial."""
    resumed_step: int | None = None
    """Step of the commit from which the trial resumes; None if it starts from the beginning."""
    notes: tuple[str, ...] = ()
    """Changes of the configuration, and their consequences."""
    may_have_more: bool = True
    """Whether a complete trial would continue with a larger ``total_steps``."""

    @property
    def trial(self) -> str:
        return self.paths.full_name

    @property
    def root(self) -> Path:
        return self.paths.run.parents[2]


def submit(proposal: Proposal) -> Submitted:
    """Write the run directory and submit the jobs.

    Raises UsageError for a trial with jobs or with another configuration, EnvironmentFailure if the
    scheduler or the directory does not work.
    """
    scheduler = make(proposal.kind)
    scheduler.check()
    calls.require_space(proposal.paths.run)
    proposal.scripts()  # Before any write, reject values that a script cannot contain.
    fresh = prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    if not fresh and proposal.renamed is not None:
        return submit(proposal.renamed())  # another process has taken the free name
    outlook = Outlook(fold([]), complete=False, left=None) if fresh else _outlook(proposal)
    if outlook.left is not None:
        clear_away(outlook.left)
    if outlook.complete:
        return Submitted(proposal.paths, proposal.kind, None, may_have_more=not outlook.exhausted)
    state, notes = outlook.state, outlook.notes
    code = _snapshot(proposal)
    number = claim_submission(proposal.paths, outlook.submission, _request(proposal, code))
    identify(proposal.paths)
    if proposal.update_code:
        notes += (f"runs the current code: {proposal.paths.snapshot(code)}",)
    ids = _hand_over(proposal, scheduler, number, code, None if fresh else state)
    jobs = Jobs(number, scheduler, ids)
    confirm_submission(proposal.paths, jobs)
    return Submitted(proposal.paths, proposal.kind, jobs, state.incarnation, outlook.step, notes)


def _hand_over(
    proposal: Proposal, scheduler: Scheduler, number: int, code: int, state: TrialState | None
) -> JobIds:
    """Write the changed configuration of an existing trial, and submit the jobs.

    ``state`` is the state of the existing trial; None for a new trial. If the scheduler rejects the
    jobs, restore the existing trial or remove the new trial. Raises SchedulerError.
    """
    paths = proposal.paths
    before = None if state is None else Before.of(paths, state.end)
    if before is not None:
        rewrite(paths, proposal.settings, proposal.plan)
    if before is not None and before.end is not None:
        resume(History(paths.history), {"submission": number})
    try:
        return scheduler.submit(proposal.request(number, trial_uuid(paths), code))
    except SchedulerError as error:
        if not may_have_worked(error):
            undo_submission(paths, number, before)
        raise


def rehearse(proposal: Proposal) -> Outlook | None:
    """Return the state of the trial that `submit` would continue; change nothing.

    Return None for a new trial. Raises UsageError if `submit` would reject the trial.
    """
    if not is_prepared(proposal.paths):
        return None
    return _outlook(proposal)


def _outlook(proposal: Proposal) -> Outlook:
    """Return the state of the trial that `submit` would continue.

    Raises UsageError for a trial with jobs, another configuration or another version of slurmrl.
    """
    check_owner(proposal.paths)
    newest = newest_submitted(proposal.paths)  # Read this first to detect a later submission.
    records = History(proposal.paths.history).read()
    names = atomic.known_names(proposal.paths.checkpoints) or ()
    saved = sorted(name for name in names if name.startswith(("step-", DAMAGED_PREFIX)))
    if not records and saved:
        raise UsageError(
            f"{proposal.paths.history} is empty, so the trial would begin again and remove its "
            f"checkpoints {', '.join(saved)}: restore the files of history/, or submit the "
            "configuration with --new"
        )
    state = fold(records)
    left, settings = _jobs_left(proposal, state), proposal.settings
    before, changed = _changes(settings)
    if changed and state.last_commit is not None:
        _check_code(proposal)  # Another version may have other defaults.
        raise UsageError(_other_configuration(before, settings, changed))
    if _complete(proposal, state):
        return Outlook(state, complete=True, left=left, submission=newest)
    _check_code(proposal)
    if (commit := state.last_commit) is not None:
        notes = _notes(before, settings, commit.step)
    else:
        notes = [f"starts from the beginning with {line}" for line in changed]
    if not proposal.update_code:
        edited = trial_code.edited(proposal.recorder.code, trial_code.current_code(proposal.paths))
        advice = f"slurmrl resume {proposal.trial} --update-code runs the present code"
        notes += [f"{text}: {advice}" for text in edited]
    return Outlook(state, complete=False, left=left, submission=newest, notes=tuple(notes))


def rejection(settings: Settings) -> str:
    """Return the reason why the trial cannot continue with a changed configuration.

    Return "" if it can, or if there is no such trial. Return "" for a trial of another version of
    slurmrl too, because its defaults may differ.
    """
    if begun_configuration(settings) is None:
        return ""
    before, changed = _changes(settings)
    if not changed or not trial_code.is_this_code(trial_code.current_code(run_paths(settings))):
        return ""
    return _other_configuration(before, settings, changed)


def _changes(settings: Settings) -> tuple[Config, Sequence[str]]:
    """Return the configuration of the existing trial, and its differences from ``settings``."""
    written = load_resolved(run_paths(settings).config)
    before = with_present_defaults(written, settings.algorithm)
    return before, differences(before, settings.config)


def _other_configuration(before: Config, settings: Settings, changed: Sequence[str]) -> str:
    paths, config = run_paths(settings), settings.config
    trial = paths.full_name
    lines = "".join(f"\n  {line}" for line in changed)
    algorithm = settings.algorithm
    if isinstance(algorithm, Evaluate) and config.actor.path != before.actor.path:
        chosen = f"--suite {algorithm.suite} " if algorithm.suite else ""
        name = free_name(settings)
        return (
            f"{trial} already evaluates another model:{lines}\n"
            f"To evaluate this model too, add to the command: {chosen}trial={name}"
        )
    return (
        f"{trial} exists with another configuration: submit it with --new, or undo:{lines}\n"
        f"Settings that a trial may change: {may_change()}"
    )


def _notes(before: Config, settings: Settings, step: int) -> list[str]:
    """Return notes about the changes of a trial that resumes from the commit of ``step``."""
    algorithm, now = settings.algorithm, settings.config
    trained = [use.role for use in algorithm.roles() if use.trained]
    untrained = {role: algorithm.untrained_steps(role) for role in trained}
    moved = partial(moved_schedules, trained=untrained, optimizer_steps=algorithm.optimizer_steps)
    return [*consequences(before, now), *moved(before, now, step=step)]


def _check_code(proposal: Proposal) -> None:
    """Raise UsageError for a trial of another slurmrl version, because it may misread new files."""
    code = trial_code.current_code(proposal.paths)
    if not proposal.update_code and not trial_code.is_this_code(code):
        name = proposal.trial
        raise UsageError(
            f"{name} was submitted with another version of slurmrl ({code}). To continue with that "
            f"version: slurmrl resume {name}; with this version: slurmrl resume {name} "
            "--update-code"
        )


def _jobs_left(proposal: Proposal, state: TrialState) -> Jobs | None:
    """Return the remaining jobs of a trial that has ended or has no job of its trainers.

    Raises UsageError for a trial whose trainers have jobs.
    """
    jobs = newest_jobs(proposal.paths)
    active = jobs.active() if jobs else []
    trainers = [task for task in active if task.group == TRAINERS]
    if trainers and state.end is None:
        name = proposal.trial
        raise UsageError(
            f"{name} is live (job {trainers[0].job_id}, {trainers[0].state}): see slurmrl status "
            f"{name}, end it with slurmrl stop {name}, or submit another trial with --new"
        )
    return jobs if active else None


def _complete(proposal: Proposal, state: TrialState) -> bool:
    """Return whether the trial has finished, and would finish at once if resumed."""
    end: Record | None = state.end
    if end is None or end.kind is not Kind.FINISHED:
        return False
    config = proposal.settings.config
    before = load_resolved(proposal.paths.config)
    at_end = config.total_steps is not None and end.data["step"] >= config.total_steps
    return at_end or (end.data["reason"] != "total_steps" and config.stop_when == before.stop_when)


def _snapshot(proposal: Proposal) -> int:
    """Return the number of the code snapshot for the next submission.

    A new snapshot takes effect once the submission's request names it.
    """
    if not proposal.update_code:
        return trial_code.current_snapshot(proposal.paths)
    return trial_code.add_snapshot(proposal.paths, proposal.recorder.code, proposal.recorder)


def _request(proposal: Proposal, code: int) -> dict[str, Any]:
    """Return the content of a submission's request."""
    config = proposal.settings.config
    return {
        "scheduler": proposal.kind,
        "run": str(proposal.paths.run),
        "snapshot": code,
        "continue": config.cluster.slurm.continue_,
        "total_steps": None if proposal.settings.algorithm.one_pass else config.total_steps,
        "heartbeat_s": PollIntervals.of(proposal.plan.hosts, config.cluster.heartbeat_s).beat_s,
        "signal_lead_s": config.cluster.slurm.signal_lead_s if proposal.kind == "slurm" else None,
    }


def newest_submitted(paths: RunPaths) -> int:
    """Return the number of the newest submission; 0 if there is none.

    Raises UsageError while another process is submitting.
    """
    submission = newest_submission(paths)
    if submission is None:
        return 0
    if not paths.submission_jobs(submission.number).exists():
        request = documents.read(paths.submission_request(submission.number))
        if may_submit(request):
            raise UsageError(_lost(paths, f" ({claimant_words(request)})"))
    return submission.number


def claim_submission(paths: RunPaths, before: int, request: Mapping[str, Any]) -> int:
    """Claim the submission after the number ``before``; return its number.

    Raises UsageError if another process has claimed it.
    """
    number = before + 1
    who = {"time": time.time(), **asdict(Claimant.of_this_process())}
    atomic.make_private_directory(paths.submission(number))
    value = json.dumps({**request, **who}).encode()
    if not atomic.exclusive_create(paths.submission_request(number), value):
        raise UsageError(_lost(paths))
    return number


def confirm_submission(paths: RunPaths, jobs: Jobs) -> None:
    """Cancel these jobs and raise UsageError if there is a newer submission in spite of the claim.

    An older slurmrl may have submitted, or another process may have mistaken this process for dead.
    Even without this check, the jobs would exit.
    """
    newest = newest_submission(paths)
    if newest is not None and newest.number > jobs.number:
        jobs.scheduler.cancel(jobs.ids)
        raise UsageError(_lost(paths, "; the jobs of this command were cancelled"))


def _lost(paths: RunPaths, more: str = "") -> str:
    name = paths.full_name
    message = f"{name} is being submitted by another process at this moment{more}"
    return f"{message}; see slurmrl status {name}"


@dataclass(frozen=True)
class Before:
    """The parts of an existing trial that a submission replaces, for restoring them."""

    files: Mapping[Path, bytes]
    end: Record | None

    @staticmethod
    def of(paths: RunPaths, ended: Record | None) -> Before:
        """Read the parts. Raises CorruptFileError, EnvironmentFailure."""
        replaced = (paths.config, paths.plan, paths.estimates)
        return Before({path: atomic.read(path) for path in replaced if path.exists()}, ended)


def undo_submission(paths: RunPaths, number: int, before: Before | None) -> None:
    """Remove a submission that has no jobs, and restore the trial.

    ``before`` has the replaced parts of the trial; None for a new trial, which is removed. Raises
    EnvironmentFailure.
    """
    if before is None:
        remove(paths)
        return
    for path, content in before.files.items():
        atomic.replace(path, content)
    if before.end is not None:
        with suppress(TrialEndedError):  # The user has cancelled the trial in the meantime.
            end(History(paths.history), before.end.kind, before.end.data)
    shutil.rmtree(paths.submission(number), ignore_errors=True)
