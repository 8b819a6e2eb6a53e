"""Checked and planned trials, and the preparation of their run directories."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import slurmrl
from slurmrl import log
from slurmrl.config.changes import follow_actor, keep_precision
from slurmrl.config.load import Derive, dump, load_resolved
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import Config
from slurmrl.config.source import dotted
from slurmrl.data.records import longest_row
from slurmrl.desk import slurm_check, trial_code, trials
from slurmrl.desk.provenance import ProvenanceWriter, recorded_folders
from slurmrl.desk.trial_checks import (
    CHECK_TIMEOUT_S,
    POSITIONS,
    Code,
    Finding,
    check_trial,
    described,
    of_inputs,
    places,
)
from slurmrl.env import user_name
from slurmrl.errors import ConfigError, CorruptFileError, EnvironmentFailure, Problem, UsageError
from slurmrl.fsio import atomic, calls, documents, inputs
from slurmrl.fsio.documents import TEXT
from slurmrl.plan import build
from slurmrl.plan.build import make_plan
from slurmrl.plan.checks import Draft
from slurmrl.plan.checks.completion_checks import beyond_positions
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.model import Plan
from slurmrl.plan.own_algorithm import is_own
from slurmrl.plan.placement import slurm_of
from slurmrl.plan.plan_values import figures
from slurmrl.plan.settings import Settings, load_settings
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import choose, make
from slurmrl.scheduler.base import GroupRequest, SubmissionRequest
from slurmrl.scheduler.submission import Claimant, is_another, submission_numbers, wanted_tasks

logger = log.get(__name__)

SLURM: Final = "slurm"
UNNAMED: Final = "check"
"""Replaces a trial's id in jobs that are not submitted."""


@dataclass(frozen=True)
class Proposal:
    """A checked and planned trial, before anything is written."""

    settings: Settings
    plan: Plan
    paths: RunPaths
    kind: str
    """The scheduler: ``local`` or ``slurm``."""
    recorder: ProvenanceWriter
    """Writer of the snapshot's provenance record, which also has the user's code."""
    update_code: bool = False
    """Whether to take a new snapshot of the code."""
    renamed: Callable[[], Proposal] | None = None
    """Function that makes the proposal again with the next free name; None if the user chose it."""

    @property
    def trial(self) -> str:
        return self.paths.full_name

    def request(self, number: int, trial_id: str, code: int) -> SubmissionRequest:
        """Return the jobs of submission ``number``; ``code`` is the number of their snapshot."""
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
                    workers_per_host=group.slots_per_host,
                    gpus_per_worker=group.gpus_per_worker,
                    cpus_per_worker=group.cpus_per_worker,
                    mem_per_worker=group.mem_per_worker,
                    links=group.links,
                    elastic=group.elastic,
                    at_once=wanted_tasks(self.paths, group.name, group.hosts),
                    spares=group.spares,
                    slurm=slurm_of(self.settings.config, group.name).model_dump(mode="json"),
                )
                for group in self.plan.jobs
            ),
            options=self.settings.config.cluster.model_dump(mode="json"),
        )

    def scripts(self) -> dict[str, str]:
        """Return a mapping from each group to its batch script of the next submission."""
        number = max(submission_numbers(self.paths), default=0) + 1
        known = trial_uuid(self.paths) if self.paths.identity.exists() else uuid.uuid4().hex
        code = trial_code.next_snapshot if self.update_code else trial_code.current_snapshot
        return make(self.kind).scripts(self.request(number, known, code(self.paths)))

    def check(self, timeout_s: float | None, compared: set[str] | None = None) -> list[Finding]:
        """Check everything that the run will read, and whether Slurm accepts its jobs.

        `trial_checks.check_trial` explains the arguments. Without ``timeout_s``, do only instant
        checks. Check nothing for a trial with another version of slurmrl, which may have other
        settings: `submit` rejects such a trial unless it is complete.
        """
        code = Code(paths=self.recorder.code.paths)
        if is_prepared(self.paths) and not self.update_code:
            current = trial_code.current_code(self.paths)
            if not trial_code.is_this_code(current):
                return []
            code = Code(current)
        if timeout_s is None:
            return places(self.settings)
        return check_trial(
            self.settings,
            self.plan,
            code,
            timeout_s=timeout_s,
            compared=compared,
            more=self.ask_slurm(),
        )

    def ask_slurm(self) -> list[Finding]:
        """Return Slurm's objections to the jobs; none with another scheduler."""
        if self.kind != SLURM:
            return []
        return slurm_check.ask_slurm(self.settings, self.request(1, UNNAMED, 1))


def propose(
    config: Path,
    overrides: Sequence[str],
    *,
    root: str | None = None,
    scheduler: str | None = None,
    new: bool = False,
    derive: Derive | None = None,
) -> Proposal:
    """Check a configuration, from a file or a bundle, and plan its trial.

    ``new`` gives the trial a free name; ``derive`` changes the configuration of the file.

    Raises ConfigError with all problems.
    """
    if inputs.is_archive(config):
        from slurmrl.desk.unpacking import unpack  # Only bundles need this module.

        config = unpack(config, trials.root_folder(root))
    chosen = trials.chosen_root(root)
    read = partial(load_settings, config, root=chosen, scheduler=scheduler, derive=derive)
    settings = read(overrides)
    added = [f"trial={json.dumps(free_name(settings))}"] if new else kept_defaults(settings)
    if added:
        settings = read([*overrides, *added])
    other = _needs_other_code(run_paths(settings), settings.config)
    name = settings.algorithm.name
    if is_own(name) and is_prepared(run_paths(settings)) and not other:
        code = trial_code.current_code(run_paths(settings))
        settings = read([*overrides, *added, f"algorithm.name={name}"], folders=[code])
    own = _own_code(settings, settings.folders)
    settings = described(settings, Code(paths=own.paths), begun_configuration(settings))
    proposal = _planned(settings, scheduler, own, update_code=other)
    again = partial(propose, config, overrides, root=root, scheduler=scheduler, derive=derive)
    return dataclasses.replace(proposal, renamed=partial(again, new=True)) if new else proposal


def propose_resume(
    paths: RunPaths,
    overrides: Sequence[str],
    *,
    scheduler: str | None = None,
    update_code: bool = False,
) -> Proposal:
    """Plan to resume the trial of a run directory, with changes by ``overrides``.

    With ``update_code``, the trial runs the current code instead of the code of its newest
    submission. Raises UsageError if the trial was never prepared.
    """
    if not is_prepared(paths):
        raise UsageError(f"{paths.full_name} was never submitted completely: submit it again")
    root = paths.run.parents[2]
    roots = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "root"]
    real = [os.path.realpath(expanded(text.strip(" '\""))) for text in roots]
    if any(one != os.path.realpath(root) for one in real):
        raise UsageError(
            f"root: a resumed trial stays in {paths.run}; --root names the root in which resume "
            "looks for the trial"
        )
    before = load_resolved(paths.config)
    overrides = follow_actor(before, overrides)
    current = trial_code.current_code(paths)
    folders = [*recorded_folders(current), Path.cwd()] if update_code else [current]
    settings = load_settings(
        paths.config, overrides, root=root, scheduler=scheduler, folders=folders, resumed=True
    )
    if (before.experiment, before.trial) != (paths.experiment, paths.trial):
        name = f"{before.experiment}/{before.trial}"
        raise UsageError(
            f"{paths.run} holds the trial {name}: give the folder that name to resume it"
        )
    if run_paths(settings) != paths:
        raise UsageError("resume cannot rename a trial: submit the configuration with --new")
    if not update_code:
        if settings.config.code != before.code:
            raise UsageError("code: a resumed trial keeps its code; add --update-code to change it")
        own = _own_names(settings.config)
        if own and own != _own_names(before):
            raise UsageError(
                "a resumed trial keeps the code of its algorithm, reward, data and episodes; add "
                "--update-code"
            )
        return _planned(settings, scheduler, trial_code.OwnCode())
    code = _own_code(settings, list(dict.fromkeys(settings.folders)))
    return _planned(settings, scheduler, code, update_code=True)


def _own_names(config: Config) -> list[str]:
    """Return the names of the user's own algorithm, rewards, types of dataset and episodes."""
    functions = [part for reward in config.rewards().values() for part in reward.functions.values()]
    sections = config.datasets().values()
    algorithm = str(config.algorithm["name"])
    names = [algorithm, *(part.name for part in functions), *(part.type for part in sections)]
    return [*(name for name in names if ":" in name), *config.rollout.episode.own.values()]


def _needs_other_code(paths: RunPaths, config: Config) -> bool:
    """Return whether the trial has no commit and names other code than ``config``."""
    if not is_prepared(paths) or fold(History(paths.history).read()).last_commit is not None:
        return False
    before = load_resolved(paths.config)
    return (config.code, _own_names(config)) != (before.code, _own_names(before))


def kept_defaults(settings: Settings) -> list[str]:
    """Return overrides that keep the defaults with which the trial began.

    A default may have changed since then.
    """
    before = begun_configuration(settings)
    return [] if before is None else keep_precision(before, settings.config, settings.source)


def begun_configuration(settings: Settings) -> Config | None:
    """Return the configuration of the trial with this name; None without a trial or a commit."""
    paths = run_paths(settings)
    if not is_prepared(paths) or fold(History(paths.history).read()).last_commit is None:
        return None
    return load_resolved(paths.config)


def _own_code(settings: Settings, folders: Sequence[Path]) -> trial_code.OwnCode:
    code = trial_code.find_own_code(settings, folders)
    for note in code.notes:
        logger.warning("%s", note)
    return code


def _planned(
    settings: Settings,
    scheduler: str | None,
    code: trial_code.OwnCode,
    *,
    update_code: bool = False,
) -> Proposal:
    """Plan a trial. Put the chosen scheduler into the resolved configuration."""
    for note in settings.notes:
        logger.warning("%s: %s", settings.source.path, note)
    config = settings.config
    kind = choose(scheduler or config.cluster.scheduler, asks_slurm=config.asks_slurm)
    cluster = config.cluster.model_copy(update={"scheduler": kind})
    config = config.model_copy(update={"cluster": cluster})
    settings = dataclasses.replace(settings, config=config)
    hosts = build.ask_hosts(config) if kind == "slurm" else None
    plan = make_plan(settings, scheduler=kind, hosts=hosts)
    if lacking := build.lacking(plan, config, hosts):
        where = str(settings.source.path)
        raise ConfigError(tuple(Problem(where, "cluster", text) for text in lacking))
    if without_gpus := build.lacking_gpus(settings, plan):
        raise ConfigError(tuple(without_gpus))
    _check_number(plan, config, run_paths(settings))
    recorder = ProvenanceWriter(config, settings.source.path, code, kind, settings.profile)
    return Proposal(settings, plan, run_paths(settings), kind, recorder, update_code)


def _check_number(plan: Plan, config: Config, paths: RunPaths) -> None:
    """Raise UsageError if the user has set fewer rollout tasks than a start requires."""
    tasks = config.rollout.tasks
    for group in plan.jobs:
        number = wanted_tasks(paths, group.name, group.hosts)
        if group.elastic and tasks is not None and 0 < number < tasks.min:
            raise UsageError(
                f"rollout.tasks.min: {tasks.min} is not allowed: slurmrl scale has set {number} "
                "tasks for this trial. Change rollout.tasks.max too, which resets their number"
            )


def run_paths(settings: Settings) -> RunPaths:
    """Return the run directory of a trial."""
    config = settings.config
    return RunPaths.of(Path(config.root), user_name(), config.experiment, config.trial)


def free_name(settings: Settings) -> str:
    """Return the name of the trial, or the next name that no trial has."""
    here = run_paths(settings)
    return trials.next_free(
        here.trial, lambda name: RunPaths(here.run.with_name(name)).run.exists()
    )


def prepare(paths: RunPaths, settings: Settings, plan: Plan, recorder: ProvenanceWriter) -> bool:
    """Make the run directory; return False if the trial exists, and leave it unchanged then.

    The directory gets its name when it is complete, so files of two submitters never mix.

    Raises EnvironmentFailure if the directory cannot be made or does not support links,
    OwnershipError if other users could change it, and UsageError if its name is taken.
    """
    if not is_prepared(paths):
        for left in paths.run.parent.glob(f"{calls.TEMPORARY_PREFIX}*"):
            with suppress(FileNotFoundError):  # another process may rename it now
                if time.time() - left.stat().st_mtime > 24 * 3600:
                    shutil.rmtree(left, ignore_errors=True)
        made = RunPaths(calls.temporary_beside(paths.run))
        try:
            _fill(made, settings, plan, recorder)
            _remove_incomplete(paths)
            os.rename(made.run, paths.run)
            atomic.sync_directory(paths.run.parent)
            return True
        except OSError as error:
            if isinstance(error, EnvironmentFailure):
                raise
            if not is_prepared(paths):
                raise calls.explain(error, "make the run directory", paths.run) from error
        finally:
            shutil.rmtree(made.run, ignore_errors=True)
    check_owner(paths)
    return False


def _remove_incomplete(paths: RunPaths) -> None:
    """Remove a run directory that an older slurmrl left when it was killed during a submission.

    Raises UsageError for a directory with other files.
    """
    if not paths.run.is_dir() or paths.run.is_symlink() or is_prepared(paths):
        return
    known = {paths.identity, paths.code, paths.plan, paths.estimates, paths.config}
    for entry in paths.run.iterdir():
        empty = entry in paths.directories() and not any(entry.iterdir())
        written = entry in known and paths.identity.exists()
        if not (empty or written or entry.name.startswith((calls.TEMPORARY_PREFIX, ".code."))):
            if is_prepared(paths):  # Another submitter has just completed the trial.
                return
            raise UsageError(
                f"{paths.run} is no trial but contains {entry.name}: remove the directory, or "
                "submit the configuration with --new"
            )
    aside = calls.temporary_beside(paths.run)
    with suppress(FileNotFoundError):  # Another submitter may be removing it too.
        os.rename(paths.run, aside)
        if is_prepared(RunPaths(aside)):
            os.rename(aside, paths.run)
        shutil.rmtree(aside, ignore_errors=True)


def _fill(paths: RunPaths, settings: Settings, plan: Plan, recorder: ProvenanceWriter) -> None:
    for directory in paths.directories():
        atomic.make_private_directory(directory)
    check_owner(paths)
    atomic.probe_link(paths.run)
    identify(paths)
    trial_code.take_snapshot(paths, recorder.code, recorder)
    rewrite(paths, settings, plan)


def identify(paths: RunPaths) -> None:
    """Write the uuid of a new trial, or of a copy that still has the uuid of its original."""
    if paths.identity.exists() and not _has_uuid_of_original(paths):
        return
    who = {"time": time.time(), **asdict(Claimant.of_this_process())}
    claim = {"uuid": uuid.uuid4().hex, "version": slurmrl.__version__, **who}
    atomic.replace(paths.identity, json.dumps(claim).encode())


def _has_uuid_of_original(paths: RunPaths) -> bool:
    """Return whether a submission names another run directory that has the same uuid.

    An earlier submission of the copy may have been killed before it wrote a new uuid.
    """
    own = trial_uuid(paths)
    for number in submission_numbers(paths):
        with suppress(FileNotFoundError, CorruptFileError):
            made = documents.read(paths.submission_request(number)).get("run")
            other = RunPaths(Path(str(made))).identity
            if is_another(paths, made) and documents.read(other).get("uuid") == own:
                return True
    return False


def check_owner(paths: RunPaths) -> None:
    """Raise OwnershipError for a run directory that other users could change."""
    for warning in atomic.check_ownership(paths.run):
        logger.warning("%s", warning)


def is_prepared(paths: RunPaths) -> bool:
    return paths.config.exists()


def trial_uuid(paths: RunPaths) -> str:
    file = paths.identity
    found: str = documents.parse(atomic.read_needed(file), file, {"uuid": TEXT}, ("uuid",))["uuid"]
    return found


def rewrite(paths: RunPaths, settings: Settings, plan: Plan) -> None:
    """Replace configuration and plan, and the estimates that reports compare with measurements."""
    atomic.replace(paths.estimates, json.dumps(figures(settings, plan)).encode())
    atomic.replace(paths.plan, plan.to_json().encode())
    atomic.replace(paths.config, dump(settings.config).encode())


def long_sequences(settings: Settings, paths: Sequence[Path]) -> list[str]:
    """Return the notes of `check_trial` on sequences that may exceed the model's positions.

    No process is started if the data or the model exclude such sequences.
    """
    config, shape = settings.config, shape_of(settings.config.actor)
    positions = shape.positions if shape is not None else None
    draft = Draft(config, settings.algorithm, settings.source)
    new_tokens = beyond_positions(draft) if positions and config.actor.tokenizer else {}
    for where, dataset in config.datasets().items():
        new = new_tokens.get(dotted(where))
        there = all(Path(part.path).exists() for part in dataset.parts.values())
        if new and there and (longest_row(dataset) or sys.maxsize) + new > (positions or 0):
            code, only = Code(paths=paths), ("data", "lengths")
            found = of_inputs(settings, code, CHECK_TIMEOUT_S, set(), only)
            return [f"{one.key}: {one.message}" for one in found if one.subject == POSITIONS]
    return []
