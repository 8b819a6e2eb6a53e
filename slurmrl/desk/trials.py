"""The trials under a root folder, and their names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from slurmrl import env
from slurmrl.config import profiles
from slurmrl.config.profiles import expanded
from slurmrl.env import user_name
from slurmrl.errors import UnknownNameError, UsageError
from slurmrl.registry import near
from slurmrl.run.paths import RunPaths

DEFAULT_ROOT = "./runs"


def chosen_root(option: str | None) -> Path | None:
    """Return ``--root``, else SLURMRL_ROOT, as an absolute path; None if neither is given.

    Raises UsageError if the path contains an environment variable that is not set.
    """
    if not (text := option or env.ROOT.get()):
        return None
    # A run passes its own root, in which ``$`` is literal.
    literal = os.path.isabs(text) and os.path.isdir(text)
    return Path(os.path.abspath(text if literal else expanded(text)))


def root_folder(option: str | None) -> Path:
    """Return the root folder for commands without a configuration.

    The order is: the result of `chosen_root`, the root of the site profile, ./runs. Raises
    UsageError for a profile that cannot be used.
    """
    return chosen_root(option) or Path(os.path.abspath(profiles.root() or DEFAULT_ROOT))


def experiments(root: Path) -> list[str]:
    return _folders(root / user_name())


def trials(root: Path, experiment: str) -> list[RunPaths]:
    """Return the trials of an experiment in numeric order: 2 before 10."""
    names = sorted(_folders(root / user_name() / experiment), key=_counting)
    found = [RunPaths.of(root, user_name(), experiment, name) for name in names]
    return [paths for paths in found if paths.identity.exists()]


def all_trials(root: Path) -> list[RunPaths]:
    return [paths for name in experiments(root) for paths in trials(root, name)]


def names(root: Path, prefix: str) -> list[str]:
    """Return the names EXPERIMENT/TRIAL that begin with ``prefix``, in numeric order.

    List only the folders of matching experiments, and read nothing in a trial.
    """
    experiment, slash, _ = prefix.partition("/")
    labels = [
        f"{name}/{trial}"
        for name in experiments(root)
        if (name == experiment if slash else name.startswith(experiment))
        for trial in sorted(_folders(root / user_name() / name), key=_counting)
    ]
    return [label for label in labels if label.startswith(prefix)]


def find(root: Path, name: str) -> RunPaths:
    """Return the trial EXPERIMENT/TRIAL.

    Raises UsageError for a name in any other form, UnknownNameError with the most similar name.
    """
    experiment, slash, trial = name.partition("/")
    if not slash or not experiment or not trial or "/" in trial:
        known = " ".join(paths.full_name for paths in all_trials(root)[:5])
        hint = f"; existing trials: {known}" if known else ""
        raise UsageError(f"'{name}': expected EXPERIMENT/TRIAL{hint}")
    for paths in trials(root, experiment):
        if paths.trial == trial:
            return paths
    raise _unknown(root, "trial", name, [paths.full_name for paths in all_trials(root)])


def newest(root: Path) -> RunPaths:
    """Return the trial that was submitted or resumed last. Raises UnknownNameError."""
    found = all_trials(root)
    if not found:
        raise UnknownNameError(f"there are no trials in {root / user_name()} yet")
    return max(found, key=_submitted_ns)


def _submitted_ns(paths: RunPaths) -> int:
    """Return the time of the newest submission in nanoseconds since the epoch, or 0."""
    try:
        return paths.submissions.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def find_experiment(root: Path, name: str) -> list[RunPaths]:
    """Return the trials of an experiment. Raises UnknownNameError with the most similar name."""
    found = trials(root, name)
    if not found:
        known = [experiment for experiment in experiments(root) if trials(root, experiment)]
        raise _unknown(root, "experiment", name, known)
    return found


def next_free(name: str, taken: Callable[[str], bool]) -> str:
    """Return ``name`` or the first free name after it: 1 -> 2, abc -> abc-2 -> abc-3."""
    while taken(name):
        match = re.fullmatch(r"(.*-)?([0-9]+)", name)
        name = f"{match[1] or ''}{int(match[2]) + 1}" if match else f"{name}-2"
    return name


def _unknown(root: Path, kind: str, name: str, known: list[str]) -> UnknownNameError:
    where = root / user_name()
    if not known:
        return UnknownNameError(f"no {kind} '{name}': there are no trials in {where} yet")
    return UnknownNameError(f"no {kind} '{name}' in {where}; {near(name, known)}")


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(one.name for one in os.scandir(folder) if one.is_dir() and one.name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return []


def _counting(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which consecutive digits count as one number."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]
