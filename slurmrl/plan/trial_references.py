"""References to trials: ``trial:EXPERIMENT/TRIAL`` is the newest export of that trial.

``trial:EXPERIMENT/TRIAL@STEP`` is the export of a step, and ``@last`` the export of its newest
checkpoint. An export of adapters is not a complete model.

A model that is not trained can also be a checkpoint. The model is then a folder with hard links to
the files of the checkpoint, so that the other trial may delete the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from slurmrl.config.schema import Config, Model, role_key
from slurmrl.config.schema.base import NAME_PATTERN
from slurmrl.config.schema.roles import TRIAL_PREFIX
from slurmrl.config.source import KeyPath, Source, read
from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, Problem, SlurmrlError, UsageError
from slurmrl.fsio import inputs
from slurmrl.plan.estimates.shape import CONFIG
from slurmrl.plan.hub_references import value_at
from slurmrl.registry import resolve
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import Commit, fold
from slurmrl.run.paths import RunPaths

FIELDS: Final = ("path", "tokenizer")
LAST: Final = "last"
LONGEST: Final = 8
"""Maximum length of a chain of trials, each of which starts from the next."""
PIN: Final = "slurmrl.workers.master.exporting:pin_actor"
"""Name of a function in a room that ``plan`` must not import."""
_EXPORT: Final = re.compile(r"step-(?P<step>\d+)(?P<adapter>-adapter)?")
_PINNED: Final = re.compile(r"step-(\d+)\.(\d+)-checkpoint")
"""Pattern of a linked checkpoint's folder, with step and incarnation (`RunPaths.pinned`)."""


class TrialReference(NamedTuple):
    experiment: str
    trial: str
    step: int | Literal["last"] | None
    """Step of the export or checkpoint; None means the newest export."""

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.trial}"


def parse(text: str) -> TrialReference:
    """Parse a reference. Raises UsageError with the expected form."""
    experiment, _, rest = text.removeprefix(TRIAL_PREFIX).partition("/")
    trial, at, step = rest.partition("@")
    named = all(NAME_PATTERN.fullmatch(name) and ".." not in name for name in (experiment, trial))
    if not named or bool(at) != bool(re.fullmatch(rf"[0-9]{{1,9}}|{LAST}", step)):
        raise UsageError(
            f"'{text}' is not allowed: expected {TRIAL_PREFIX}EXPERIMENT/TRIAL, with @STEP for a "
            f"step or @{LAST} for the newest checkpoint"
        )
    if not at:
        return TrialReference(experiment, trial, None)
    return TrialReference(experiment, trial, "last" if step == LAST else int(step))


class TrialResolver:
    """Replaces references to trials by folders, and collects ``problems``.

    The roles in ``frozen`` are not trained. With ``planning``, it writes no files: a model with
    only an architecture replaces a checkpoint or a future export. A trial with a commit keeps the
    folder to which its reference to a newest checkpoint or export resolved.
    """

    def __init__(
        self, config: Config, source: Source, *, frozen: Collection[str], planning: bool
    ) -> None:
        self.problems: list[Problem] = []
        self._config = config
        self._source = source
        self._root = Path(config.root)
        self._configs = source.path.parent
        """Folder in which to look for configurations of trials that must be submitted first."""
        self._frozen = frozen
        self._planning = planning
        run = RunPaths.of(self._root, user_name(), config.experiment, config.trial)
        self._before = read(run.config).values if _commits(run) else {}

    def resolved(self) -> Config:
        """Return the configuration with folders; unresolved references are null."""
        update = {
            role: self._model(role, model)
            for role in self._config.roles
            if (model := self._config.find_model(role)) is not None
        }
        return self._config.with_models(update)

    def _model(self, role: str, model: Model) -> Model:
        changes: dict[str, Any] = {}
        for name in FIELDS:
            text = getattr(model, name)
            if text is None or not text.startswith(TRIAL_PREFIX):
                continue
            key = (*role_key(role), name)
            try:
                folder = self._folder(key, text, frozen=role in self._frozen)
            except (UsageError, EnvironmentFailure) as error:
                self.problems.append(self._source.problem(key, str(error)))
                folder = None
            changes[name] = None if folder is None else str(folder)
            if folder is None and self._planning:
                changes |= self._promised(name, text, model)
        return model.model_copy(update=changes)

    def _promised(self, name: str, text: str, model: Model) -> dict[str, Any]:
        """Return the settings that a plan needs in place of a missing folder."""
        tokenizer = _tokenizer_of(text, self._root)
        if name == "tokenizer":
            return {"tokenizer": tokenizer}
        architecture = promised(text, self._root, self._configs)
        return {"architecture": architecture, "tokenizer": model.tokenizer or tokenizer}

    def _folder(self, key: KeyPath, text: str, *, frozen: bool) -> Path | None:
        """Return the folder that a reference names; None for a checkpoint with ``planning``.

        Raises UsageError with the step that the user must do first.
        """
        reference = parse(text)
        paths = RunPaths.of(self._root, user_name(), reference.experiment, reference.trial)
        if (kept := self._kept(key, reference, paths)) is not None:
            return kept
        exports, commits = Exports.of(paths), _commits(paths)
        step = reference.step
        if step is None:
            if exports.newest is not None and exports.newest in exports.whole:
                return exports.whole[exports.newest]
            message = self._no_export(text, reference, exports)
            if commits and frozen:
                message += f"; or take its newest checkpoint: {text}@{LAST}"
            raise UsageError(message)
        if step == "last":
            if not commits:
                message = f"'{text}': {reference.name} has no checkpoint yet; first submit it"
                raise UsageError(f"{message}: {self._submit(reference)}")
            step = commits[-1].step
        if step in exports.whole:
            return exports.whole[step]
        known = [commit.step for commit in commits]
        if step not in known:
            if frozen and (earlier := _earlier_pin(paths, step)) is not None:
                return earlier
            raise UsageError(
                f"'{text}': {reference.name} has neither an export nor a checkpoint of step {step} "
                f"(exports: {exports.listed()}; checkpoints: "
                f"{', '.join(map(str, sorted(known))) or 'none'})"
            )
        if not frozen:
            raise UsageError(
                f"'{text}' has no export yet (exports in {paths.exports}: {exports.listed()}), and "
                f"training must start from an export; export the checkpoint first: slurmrl "
                f"export {reference.name} --step {step}{exports.form}"
            )
        # The newest checkpoint may have been deleted by now, so look it up again.
        newest = reference.step == LAST
        return None if self._planning else _pinned(text, paths, None if newest else step)

    def _kept(self, key: KeyPath, reference: TrialReference, paths: RunPaths) -> Path | None:
        """Return the folder that the trial's configuration has for a reference, or None."""
        before = value_at(self._before, key)
        if isinstance(reference.step, int) or not isinstance(before, str):
            return None
        folder = Path(before)
        return folder if folder.parent == paths.exports and folder.is_dir() else None

    def _no_export(self, text: str, reference: TrialReference, exports: Exports) -> str:
        """Return a message with advice about a trial that has exported no complete model."""
        if exports.newest is None:
            message = f"'{text}' has no export yet in {exports.folder}; first let that trial "
            message += f"finish: {self._submit(reference)}"
            merge = f", then export a whole model: slurmrl export {reference.name}{exports.form}"
            return message + (merge if exports.form else "")
        message = (
            f"the newest export of '{text}' (step {exports.newest}) is an adapter; export a whole "
            f"model: slurmrl export {reference.name} --step {exports.newest}{exports.form}"
        )
        if exports.whole:
            message += f", or name an older export: {text}@{max(exports.whole)}"
        return message

    def _submit(self, reference: TrialReference) -> str:
        """Return the command that submits a trial, with a placeholder for an unknown file."""
        path = _find(reference.experiment, self._configs)
        own = read(path).values.get("trial") if path is not None else None
        trial = Config.model_fields["trial"].default if own is None else own
        which = "" if str(trial) == reference.trial else f" trial={reference.trial}"
        file = path or f"<the configuration of experiment {reference.experiment}>"
        return f"slurmrl submit {file}{which}"


@dataclass(frozen=True)
class Exports:
    """Mapping from a step to the trial's export of the actor."""

    folder: Path
    whole: Mapping[int, Path]
    adapters: Mapping[int, Path]
    form: str
    """Option with which the trial exports a complete model; empty if no option is needed."""

    @staticmethod
    def of(paths: RunPaths) -> Exports:
        whole: dict[int, Path] = {}
        adapters: dict[int, Path] = {}
        for folder in paths.exports.iterdir() if paths.exports.is_dir() else ():
            if match := _EXPORT.fullmatch(folder.name):
                (adapters if match["adapter"] else whole)[int(match["step"])] = folder
        merges = adapters or _exports_adapters(paths)
        return Exports(paths.exports, whole, adapters, " --form merged" if merges else "")

    @property
    def newest(self) -> int | None:
        return max((*self.whole, *self.adapters), default=None)

    def listed(self) -> str:
        """Return the steps of all exports, for a message."""
        steps = [(step, str(step)) for step in self.whole]
        steps += [(step, f"{step} (adapter)") for step in self.adapters]
        return ", ".join(text for _, text in sorted(steps)) or "none"


def _exports_adapters(paths: RunPaths) -> bool:
    """Return whether a trial exports adapters by default."""
    try:
        values = read(paths.config).values if paths.config.is_file() else {}
    except UsageError:
        return False  # Another version of slurmrl wrote the file.
    actor, checkpoint = (values.get(section) or {} for section in ("actor", "checkpoint"))
    return checkpoint.get("export_form") == "adapter" and actor.get("lora") is not None


def _commits(paths: RunPaths) -> tuple[Commit, ...]:
    return fold(History(paths.history).read()).commits


def _earlier_pin(paths: RunPaths, step: int) -> Path | None:
    """Return the folder of links to a deleted checkpoint of a step; None if there is none.

    If several incarnations have such a folder, return the newest incarnation's folder.
    """
    folders = paths.exports.iterdir() if paths.exports.is_dir() else ()
    matches = ((_PINNED.fullmatch(folder.name), folder) for folder in folders)
    found = {int(m[2]): folder for m, folder in matches if m and int(m[1]) == step}
    return found[max(found)] if found else None


def _pinned(text: str, paths: RunPaths, step: int | None) -> Path:
    """Return the folder of links to a checkpoint, by default to the newest checkpoint.

    Raises UsageError, EnvironmentFailure.
    """
    try:
        folder: Path = resolve(PIN)(paths, step)
    except (UsageError, EnvironmentFailure):
        raise
    except SlurmrlError as error:  # The checkpoint may be damaged.
        raise UsageError(f"'{text}' cannot be used: {error}") from error
    return folder


def promised(
    text: str, root: Path, configs: Path, *, longest: int = LONGEST
) -> dict[str, Any] | None:
    """Return the architecture of a referenced trial that has no folder yet; None if unknown.

    Sources are the trial's run directory, a configuration in ``configs``, and the trial or folder
    from which the referenced trial starts.
    """
    try:
        experiment, trial, _ = parse(text)
    except UsageError:
        return None
    files = [RunPaths.of(root, user_name(), experiment, trial).config, _find(experiment, configs)]
    for path in files:
        if path is None or not path.is_file():
            continue
        actor = read(path).values.get("actor")
        if not isinstance(actor, dict):
            continue
        if isinstance(actor.get("architecture"), dict):
            return dict(actor["architecture"])
        start = str(actor.get("path"))
        if start.startswith(TRIAL_PREFIX) and longest > 0:
            return promised(start, root, configs, longest=longest - 1)
        if (values := _config_json(path.parent / start)) is not None:
            return values
    return None


def _tokenizer_of(text: str, root: Path) -> str | None:
    """Return the tokenizer's folder of a submitted trial; None if unknown."""
    try:
        experiment, trial, _ = parse(text)
    except UsageError:
        return None
    file = RunPaths.of(root, user_name(), experiment, trial).config
    actor = read(file).values.get("actor") if file.is_file() else None
    tokenizer = actor.get("tokenizer") if isinstance(actor, dict) else None
    return tokenizer if isinstance(tokenizer, str) else None


def _config_json(folder: Path) -> dict[str, Any] | None:
    try:
        return inputs.read_json(folder / CONFIG)
    except UsageError:
        return None


def _find(experiment: str, folder: Path) -> Path | None:
    for path in sorted(folder.glob("*.yaml")):
        try:
            found = read(path).values.get("experiment")
        except UsageError:
            continue  # The file is not a configuration.
        if found == experiment:
            return path
    return None
