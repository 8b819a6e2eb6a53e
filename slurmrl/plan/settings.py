"""A checked configuration together with its algorithm's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from pydantic import BaseModel, ValidationError

from slurmrl.config import profiles
from slurmrl.config.load import Derive, load, parse, validate
from slurmrl.config.problems import show
from slurmrl.config.profiles import expanded
from slurmrl.config.schema import Config
from slurmrl.config.source import COMMAND_LINE, KeyPath, Source, dotted, value_at
from slurmrl.errors import ConfigError, Problem, UnreadableInputError, UsageError
from slurmrl.plan import hub_references, inherited_settings
from slurmrl.plan.algorithms import ALGORITHMS, Algorithm, uses_of
from slurmrl.plan.checks import (
    Draft,
    completion_checks,
    generators,
    image_checks,
    layouts,
    model_sources,
    sections,
)
from slurmrl.plan.checks.fit import hardware, memory
from slurmrl.plan.checks.sections import unused_roles, unused_tools
from slurmrl.plan.estimates.hardware import hardware_of
from slurmrl.plan.hub_references import HubResolver
from slurmrl.plan.inherited_settings import complete
from slurmrl.plan.own_algorithm import (
    FORMS,
    KIND,
    describe,
    importable,
    is_own,
    load_on_login_node,
    name_modules,
    own_name,
    violations,
    wrong_class,
)
from slurmrl.plan.trial_references import TrialResolver
from slurmrl.registry import import_own, near
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import choose

Check: TypeAlias = Callable[[Draft], Iterable[Problem]]

CHECKS: Final[tuple[Check, ...]] = (
    layouts.backends,
    layouts.gpus,
    layouts.batches,
    layouts.hosts,
    layouts.rollout_instances,
    layouts.architectures,
    hardware,
    generators.tasks,
    model_sources.implementations,
    sections.engine_options,
    sections.optimizers,
    sections.averages,
    completion_checks.completions,
    completion_checks.votes,
    model_sources.adapters,
    model_sources.base_reference,
    sections.dataset_types,
    sections.dataset_chats,
    sections.conflicts,
    sections.reward,
    sections.suite_rewards,
    generators.evaluation_tasks,
    completion_checks.episodes,
    completion_checks.sampling,
    completion_checks.experts,
    completion_checks.publication,
    image_checks.images,
    sections.length_of_run,
    sections.untrained_steps,
    sections.stop_when,
    sections.something_to_do,
    sections.graphs,
)
"""Checks that every plan must pass. A check yields the problems that prevent planning."""
SUBMISSION: Final[tuple[Check, ...]] = (
    memory,
    layouts.runnable,
    layouts.generation,
    generators.servers,
    generators.fp8,
    generators.fp8_training,
    sections.folder_of_runs,
    model_sources.weights,
    model_sources.lengths,
    completion_checks.transformers_generation,
    model_sources.tokenizer,
    model_sources.stop_tokens,
    sections.dataset_files,
    image_checks.pillow,
)
"""Additional checks of a submission: memory, existing files and engines. A layout can be planned
even if no engine of this version can run the layout."""


def check(draft: Draft) -> list[Problem]:
    """Return the problems that prevent planning."""
    return [problem for find_problems in CHECKS for problem in find_problems(draft)]


def check_submission(draft: Draft) -> list[Problem]:
    """Return the problems that prevent the submission of a valid plan."""
    return [problem for find_problems in SUBMISSION for problem in find_problems(draft)]


@dataclass(frozen=True)
class ProfileUse:
    """A site profile, and the settings that a configuration takes from it."""

    file: Path
    settings: dict[str, Any]
    """Mapping from a dotted key to its value, which only the profile sets."""

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.file), "settings": self.settings}


@dataclass(frozen=True)
class Settings:
    """A resolved configuration and its algorithm.

    ``config`` has absolute paths, every section that the algorithm uses, and the algorithm's
    settings with their defaults.
    """

    config: Config
    algorithm: Algorithm
    source: Source
    notes: tuple[str, ...] = ()
    """Notes for the user about deprecated spellings and missing metrics."""
    missing: tuple[Problem, ...] = ()
    """Problems that would prevent a submission, collected only for a plan."""
    folders: tuple[Path, ...] = ()
    """Folders that are searched for the user's own code."""
    profile: ProfileUse | None = None


def load_settings(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    root: Path | None = None,
    scheduler: str | None = None,
    planning: bool = False,
    folders: Sequence[Path] | None = None,
    resumed: bool = False,
    data: bool = False,
    derive: Derive | None = None,
) -> Settings:
    """Read, resolve and check a configuration.

    Args:
        root: Folder of all runs in place of the configuration's value.
        scheduler: Scheduler in place of the configuration's value.
        planning: Collect absent files and engines in ``missing`` instead of raising ConfigError.
        folders: Folders with the user's own code. Default: the file's and the current folder.
        resumed: The file belongs to a trial. Accept unused sections, and ignore the site profile.
        data: Fetch datasets of the hub even with ``planning``.
        derive: Function that changes the values of the file before the overrides apply.

    Raises ConfigError with all problems: of syntax, of values, of the algorithm's settings, and of
    the files that the configuration names.
    """
    source = load(path, overrides, derive, None if resumed else profiles.in_force())
    searched = [path.parent.absolute(), Path.cwd()] if folders is None else list(folders)
    own, problems = name_modules(source)
    if problems:
        raise ConfigError(tuple(problems))
    searched = list(dict.fromkeys([*own, *searched]))
    with importable(searched):
        config, wrong = validate(Config, source)
        schema, searched, more = _schema(source, searched)
        problems = [*source.problems, *wrong, *more]
        checked = partial(
            _checked, source, config, schema, searched, problems, root, scheduler, resumed
        )
        if not planning and config is not None and hub_references.are_in(config):
            # Reject an invalid configuration before a large model is fetched.
            checked(planning=True, data=False)
        return checked(planning=planning, data=data)


def _checked(
    source: Source,
    config: Config | None,
    schema: type[BaseModel] | None,
    folders: list[Path],
    problems: Sequence[Problem],
    root: Path | None,
    scheduler: str | None,
    resumed: bool,
    *,
    planning: bool,
    data: bool,
) -> Settings:
    problems = list(problems)
    algorithm: Algorithm | None = None
    if schema is not None:
        algorithm, more = _algorithm(schema, source)
        problems += more
    if algorithm is not None and config is not None:
        more = [source.problem(*each) for each in violations(algorithm, config, folders)]
        problems += more
        algorithm = None if more else algorithm
    notes: list[str] = []
    missing: list[Problem] = []
    if config is not None:
        config, notes = _without_lost_hardware(config, source) if resumed else (config, [])
        config = _with_root(config, root)
        config, more, said = inherited_settings.apply(config, source)
        problems, notes = [*problems, *more], [*notes, *said]
        trials = TrialResolver(config, source, frozen=_frozen(config, algorithm), planning=planning)
        config, missing = trials.resolved(), trials.problems
        resolver = HubResolver(config, source, planning=planning, data=data)
        config = resolver.resolved()
        missing += resolver.problems
        config, more = hub_references.decided(config, source)
        missing += more
        if algorithm is not None:
            kind = choose(scheduler or config.cluster.scheduler, asks_slurm=config.asks_slurm)
            config = inherited_settings.with_precision(config, kind)
            config, more = complete(config, algorithm, source)
            problems += more
            algorithm = algorithm.completed(config)
            config = _with_algorithm(config, algorithm)
            notes += sections.notes(config, algorithm)
            draft = Draft(config, algorithm, source)
            notes += layouts.spellings(draft)
            problems += [] if resumed else [*unused_roles(draft), *unused_tools(draft)]
            problems += _new([*problems, *missing], check(draft))
            missing += _new([*problems, *missing], check_submission(draft))
    if not planning:
        problems += missing
    if problems or config is None or algorithm is None:
        raise ConfigError(tuple(problems))
    return Settings(
        config,
        algorithm,
        source,
        tuple(notes),
        tuple(missing if planning else ()),
        tuple(folders),
        _profile_use(source, root, scheduler),
    )


def _without_lost_hardware(config: Config, source: Source) -> tuple[Config, list[str]]:
    """Return the configuration without an unusable hardware profile, and a note about the profile.

    Only predictions need the profile, so a trial continues without it. Keep a profile that the
    command line sets.
    """
    if config.cluster.hardware is None or source.where(("cluster", "hardware")) == COMMAND_LINE:
        return config, []
    try:
        hardware_of(config.cluster)
    except (UsageError, UnreadableInputError) as error:
        cluster = config.cluster.model_copy(update={"hardware": None})
        note = f"cluster.hardware is ignored, because only predictions need it: {error}"
        return config.model_copy(update={"cluster": cluster}), [note]
    return config, []


def _profile_use(source: Source, root: Path | None, scheduler: str | None) -> ProfileUse | None:
    """Return the site profile's values, except values that ``root`` or ``scheduler`` overrides."""
    if source.profile is None:
        return None
    given: dict[KeyPath, object] = {("root",): root, ("cluster", "scheduler"): scheduler}
    keys = [key for key in source.of_profile() if given.get(key) is None]
    return ProfileUse(source.profile, {dotted(key): value_at(source.values, key) for key in keys})


def load_run_settings(paths: RunPaths) -> Settings:
    """Return the settings of a run directory, which the submission has checked."""
    return load_resolved_settings(paths.config)


def load_resolved_settings(path: Path) -> Settings:
    """Return the settings in a resolved configuration. Raises ConfigError."""
    source = load(path)
    config = parse(source)
    name = str(config.algorithm.get("name"))
    schema = import_own(KIND, name) if is_own(name) else ALGORITHMS.load(name)
    algorithm, problems = _algorithm(schema, source)
    if problems or algorithm is None:
        raise ConfigError(tuple(problems))
    return Settings(config, algorithm, source)


def _schema(
    source: Source, folders: list[Path]
) -> tuple[type[BaseModel] | None, list[Path], list[Problem]]:
    """Return the schema of ``algorithm.name``, the folders of the user's code, and problems.

    Replace the name of a file in the values with the name of its module.
    """
    values = source.values.get("algorithm")
    if not isinstance(values, dict):
        return None, folders, []  # The validation of the whole file reports the missing section.
    name, known = values.get("name"), sorted(ALGORITHMS)
    where = ("algorithm", "name")
    if name is None:
        message = f"is required; allowed: {', '.join(known)}, {FORMS}"
        return None, folders, [source.problem(where, message)]
    if name in known:
        return cast(type[BaseModel], ALGORITHMS.load(name)), folders, []
    try:
        own = own_name(str(name), source.folder(where))
        if own is None:
            message = f"{show(name)} is unknown; {near(str(name), known)}, {FORMS}"
            return None, folders, [source.problem(where, message)]
        values["name"] = own.reference
        first = [*_named_folders(source), *([own.folder] if own.folder else [])]
        folders = list(dict.fromkeys([*first, *folders]))
        with importable(folders):
            schema = load_on_login_node(own.reference, folders)
        if reason := wrong_class(schema):
            raise UsageError(f"'{own.reference}' is not allowed: {reason}")
        return schema, folders, []
    except UsageError as error:
        return None, folders, [source.problem(where, str(error))]


def _named_folders(source: Source) -> list[Path]:
    """Return the folders of the entries of ``code``."""
    entries = source.values.get("code")
    paths = [entry for entry in entries if isinstance(entry, str)] if entries else []
    folder = source.folder(("code",))
    return [(folder / expanded(entry)).absolute().parent for entry in paths]


def _algorithm(schema: type[BaseModel], source: Source) -> tuple[Algorithm | None, list[Problem]]:
    """Return the section ``algorithm`` as an object of the algorithm's schema, and problems."""
    try:
        algorithm, problems = validate(schema, source, ("algorithm",))
    except Exception as error:  # A validator of the user's code may raise any error.
        if not is_own(source.values["algorithm"]["name"]):
            raise
        message = f"{schema.__name__} rejects its settings with {describe(error, [])}"
        raise ConfigError((source.problem(("algorithm",), message),)) from error
    return cast(Algorithm | None, algorithm), problems


def _with_root(config: Config, root: Path | None) -> Config:
    chosen = Path(config.root) if root is None else root
    return config.model_copy(update={"root": str(chosen.absolute())})


def with_present_defaults(config: Config, algorithm: Algorithm) -> Config:
    """Return a trial's resolved configuration with defaults for new settings of its algorithm.

    The algorithm did not have these settings at the trial's submission. The class of ``algorithm``
    has the defaults.
    """
    if config.algorithm.get("name") != algorithm.name:
        return config
    try:
        before = type(cast(BaseModel, algorithm)).model_validate(config.algorithm)
    except ValidationError:  # The class has changed since the submission.
        return config
    return _with_algorithm(config, cast(Algorithm, before).completed(config))


def _with_algorithm(config: Config, algorithm: Algorithm) -> Config:
    values = cast(BaseModel, algorithm).model_dump(mode="json")
    return config.model_copy(update={"algorithm": values})


def _frozen(config: Config, algorithm: Algorithm | None) -> set[str]:
    """Return the roles that a trial does not train."""
    uses = uses_of(config, algorithm) if algorithm is not None else ()
    return {use.role for use in uses if not use.trained or config.total_steps == 0}


def _new(reported: Sequence[Problem], found: Sequence[Problem]) -> list[Problem]:
    """Return the found problems, except problems of a reported key or of keys in its section.

    The value of a reported key is a default that has replaced the invalid value.
    """
    keys = {problem.key for problem in reported if problem.key}
    return [
        problem
        for problem in found
        if not any(problem.key == key or problem.key.startswith(f"{key}.") for key in keys)
    ]
