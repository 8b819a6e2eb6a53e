"""Export of a committed checkpoint in Hugging Face form, without torch."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.export import export
from slurmrl.checkpoint.manifest import open_verified, read_state, until_certain
from slurmrl.checkpoint.precision import FLOATS, Precision
from slurmrl.checkpoint.tensors import DTYPES
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config, Model
from slurmrl.config.schema.frequency import ExportDtype
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
    UsageError,
)
from slurmrl.fsio import inputs
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.primitives import is_temporary
from slurmrl.history.log import History
from slurmrl.history.state import Commit, fold
from slurmrl.models.config import Head
from slurmrl.models.headers import read_headers
from slurmrl.models.storage import file_form
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.plan.model_files import EOS, config_values, generation_values, stop_tokens, text_config
from slurmrl.workers.master.progress import STATE

ROLE = "actor"
TOKEN_IDS = ("bos_token_id", EOS, "pad_token_id")
LEFT_S = 24 * 3600.0
"""Age at which a temporary directory counts as left over by a killed export."""


@dataclass(frozen=True)
class Exporter:
    """Exports of one role of a trial."""

    paths: RunPaths
    config: Config
    role: str
    head: Head
    dtype: ExportDtype

    @property
    def model(self) -> Model:
        model: Model = getattr(self.config, self.role)
        return model

    def write(self, commit: Commit, target: Path) -> Path:
        """Export a commit; return the directory. Raises DamagedCheckpointError before writing."""
        _sweep(self.paths)
        model, checkpoint = self.model, self.paths.checkpoints / commit.directory
        weights = open_verified(checkpoint, self.role)
        stops = self._stop_tokens(checkpoint)
        stated = config_values(model)
        if stated.get(EOS) is None and text_config(stated).get(EOS) is None:
            # The family's default need not be a token of this tokenizer.
            stated = {**stated, EOS: _one_or_list(stops)}
        values, storage = file_form(stated, model.implementation, self.head)
        tokenizer = model.tokenizer or self.config.actor.tokenizer
        make_private_directory(target.parent)
        return export(
            weights,
            values,
            target,
            generation=_generation(generation_values(model), values, stops),
            storage=storage,
            precision=_precision(model, self.dtype),
            tokenizer=Path(tokenizer) if tokenizer else None,
        )

    def _stop_tokens(self, checkpoint: Path) -> list[int]:
        """Return the stop tokens of the run; those of the model files if none were committed."""
        committed = read_state(checkpoint, STATE).get("stop_token_ids")
        return list(committed if committed is not None else stop_tokens(self.config, None))


def export_actor(paths: RunPaths, config: Config, commit: Commit) -> Path:
    """Export a commit to ``export/step-<s>``, loadable by transformers; return that directory.

    Raises DamagedCheckpointError before anything is written.
    """
    exporter = Exporter(paths, config, ROLE, "lm", config.checkpoint.export_dtype)
    return until_certain(lambda: exporter.write(commit, paths.export(commit.step)))


def export_step(
    paths: RunPaths,
    role: str,
    step: int | None,
    target: Path | None,
    dtype: ExportDtype | None = None,
) -> Path:
    """Export a commit of any trial, running or not; by default the newest, into its own directory.
    If the run deletes the commit meanwhile, another one is chosen.

    Raises UsageError for an unknown step or role or a target in use, CheckpointError for a damaged
    commit, naming the alternatives.
    """
    config = load_resolved(paths.config)
    dtype = dtype or config.checkpoint.export_dtype
    exporter = Exporter(paths, config, role, _head(paths, role), dtype)
    if target is not None and target.exists() and not _is_empty_folder(target):
        raise UsageError(f"{target} exists already: choose a new directory")
    while True:
        commit = _choose(paths, step)
        try:
            return exporter.write(commit, target or paths.export(commit.step, role))
        except (CheckpointError, CorruptFileError, EnvironmentFailure) as error:
            left = fold(History(paths.history).read()).commits
            if commit not in left:
                continue
            if isinstance(error, DamagedCheckpointError):
                raise CheckpointError(f"{error}. {_remedy(paths, commit, left)}") from error
            raise


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _remedy(paths: RunPaths, damaged: Commit, commits: Sequence[Commit]) -> str:
    others = [commit.step for commit in commits if commit != damaged]
    if not others:
        return "Nothing was exported, and there is no other checkpoint"
    steps = ", ".join(map(str, others))
    return (
        f"Nothing was exported; choose another checkpoint with --step (there are: {steps}); "
        f"`slurmrl checkpoints {paths.experiment}/{paths.trial}` shows which are intact"
    )


def _choose(paths: RunPaths, step: int | None) -> Commit:
    commits = fold(History(paths.history).read()).commits
    if not commits:
        raise UsageError(f"{paths.experiment}/{paths.trial} has no checkpoint yet")
    matching = [commit for commit in commits if step in (None, commit.step)]
    if not matching:
        known = ", ".join(str(commit.step) for commit in commits)
        raise UsageError(f"no checkpoint of step {step}; there are: {known}")
    return matching[-1]


def _head(paths: RunPaths, role: str) -> Head:
    """Return the head of a trained role; checkpoints hold no other roles."""
    models = Plan.read(paths.plan).models
    trained = sorted(name for name, model in models.items() if model.trained)
    if role not in trained:
        raise UsageError(f"'{role}' is not in the checkpoints; there are: {', '.join(trained)}")
    head: Head = models[role].head
    return head


def _generation(
    stated: Mapping[str, Any], config: Mapping[str, Any], stops: list[int]
) -> dict[str, Any]:
    """Return generation_config.json: that of the model, or one made from config.json, in either
    case with the stop tokens of the run."""
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    values = dict(stated) or {"_from_model_config": True, **ids}
    known = values.get(EOS)
    if not stops or set(stops) == set(known if isinstance(known, list) else [known]):
        return values
    values.pop("_from_model_config", None)  # transformers would take config.json's ids instead
    return {**values, EOS: _one_or_list(stops)}


def _one_or_list(stops: list[int]) -> int | list[int] | None:
    if not stops:
        return None
    return stops[0] if len(stops) == 1 else stops


def _precision(model: Model, dtype: ExportDtype) -> Precision:
    if dtype != "source":
        return Precision(dtype)
    values = config_values(model)
    stated = values.get("dtype") or values.get("torch_dtype")
    tensors = _source_dtypes(Path(model.path)) if model.path is not None else {}
    if stated not in FLOATS:
        common = Counter(tensors.values()).most_common(1)
        stated = common[0][0] if common else None
    return Precision(stated, tensors)


def _source_dtypes(folder: Path) -> dict[str, str]:
    """The types of the tensors in a model folder's files; quantised ones are left out."""
    inputs.check_folder(folder)
    headers, _ = read_headers(folder)
    dtypes = {name: DTYPES.get(header.dtype, "") for name, header in headers.items()}
    return {name: dtype for name, dtype in dtypes.items() if dtype in FLOATS}


def _sweep(paths: RunPaths) -> None:
    with suppress(OSError):
        for folder in filter(lambda entry: is_temporary(entry.name), paths.exports.iterdir()):
            if time.time() - folder.stat().st_mtime > LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)
