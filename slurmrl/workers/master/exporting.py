"""Export of a committed checkpoint as a Hugging Face model folder, without torch."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slurmrl.algorithms.preference_schema import REWARD_MODEL_INPUTS, REWARD_MODELS
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Config, Lora, Model
from slurmrl.config.schema.config import ExportDtype, ExportForm
from slurmrl.data.chat import template_file
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    DamagedCheckpointError,
    EnvironmentFailure,
    UsageError,
)
from slurmrl.fsio import inputs
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.calls import REAL, is_temporary
from slurmrl.models.adapters import write_adapter
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig, stored
from slurmrl.models.model_tensors import merged_weights, open_folder, read_headers, stored_name
from slurmrl.models.shapes import FolderTensors, file_form, mtp_entries, states_mtp
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.shape import (
    CONFIG,
    EOS,
    GENERATION_CONFIG,
    SCORE_AT,
    TURN_END,
    config_values,
    generation_values,
    stop_tokens,
    text_config,
)
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import load_resolved_settings
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import Commit, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint import manifest
from slurmrl.tensors.checkpoint.export import (
    AS_STORED,
    ENOUGH,
    FLOATS,
    ExportedWeights,
    Precision,
    Survival,
    TokenizerFiles,
    export,
    survival,
    widened,
    write_folder,
    write_json,
)
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import Storage, TensorEntry, file_entries
from slurmrl.tensors.layout import Box
from slurmrl.workers.master.progress import STATE

ROLE = "actor"
TOKEN_IDS = ("bos_token_id", EOS, "pad_token_id")
LEFT_S = 24 * 3600.0  # Older temporary directories are leftovers of killed exports.
Made = TypeVar("Made")


@dataclass(frozen=True)
class Exported:
    """A finished export."""

    folder: Path
    types: ExportTypes | None = None
    """Types of the tensors; None for adapters, which keep their type."""

    @property
    def warning(self) -> str | None:
        return None if self.types is None else self.types.warning


@dataclass(frozen=True)
class Exporter:
    """Exporter of one role of a trial."""

    paths: RunPaths
    config: Config
    role: str
    head: Head
    dtype: ExportDtype
    form: ExportForm
    """Form of the export if the role trains adapters. Other roles always have full weights."""

    @property
    def model(self) -> Model:
        return self.config.model(self.role)

    def folder(self, step: int) -> Path:
        """Return the default folder of an export of a step."""
        adapter = self.model.lora is not None and self.form == "adapter"
        return self.paths.export(step, self.role, adapter=adapter)

    def write(self, commit: Commit, target: Path) -> Exported:
        """Export a commit. Raises DamagedCheckpointError before it writes anything."""
        _sweep(self.paths)
        model, checkpoint = self.model, self.paths.checkpoints / commit.directory
        trained = manifest.open_verified(checkpoint, self.role)
        if model.lora is not None and self.form == "adapter":
            return Exported(self._write_adapter(trained, target, model.lora, checkpoint))
        weights = self._whole(trained)
        values, generation, storage = self._model_files(checkpoint)
        types = export_types(model, self.dtype, weights, storage)
        make_private_directory(target.parent)
        folder = export(
            weights,
            values,
            target,
            generation=generation,
            storage=storage,
            more=self._mtp(values),
            precision=types.precision,
            tokenizer=self._tokenizer(checkpoint),
        )
        return Exported(folder, types)

    def pin(self, commit: Commit, target: Path) -> Path:
        """Make a model folder with links to a commit's files. Raises DamagedCheckpointError."""
        model, checkpoint = self.model, self.paths.checkpoints / commit.directory
        manifest.verify(checkpoint, checksums=False)
        values, generation, _ = self._model_files(checkpoint)
        origin = manifest.PinnedOrigin(
            version=manifest.ORIGIN_VERSION,
            trial=f"{self.paths.experiment}/{self.paths.trial}",
            step=commit.step,
            role=self.role,
            implementation=model.implementation,
            head=self.head,
            base=None if model.lora is None else model.path,
            lora=None if model.lora is None else model.lora.model_dump(mode="json"),
            dtype=None if model.lora is None else model.dtype,
        )

        tokenizer = self._tokenizer(checkpoint)

        def fill(folder: Path) -> None:
            manifest.pin(checkpoint, origin, folder)
            write_json(folder / CONFIG, {**values, "dtype": "float32"}, REAL)
            write_json(folder / GENERATION_CONFIG, generation, REAL)
            if tokenizer is not None:
                tokenizer.copy(folder, REAL)

        make_private_directory(target.parent)
        return write_folder(target, fill)

    def _model_files(self, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any], Storage]:
        """Return ``config.json``, ``generation_config.json`` and the layout of weights in files."""
        model, stops = self.model, self._stop_tokens(checkpoint)
        stated = config_values(model)
        if stated.get(EOS) is None and text_config(stated).get(EOS) is None:
            # This tokenizer may lack the family's default token.
            stated = {**stated, EOS: _one_or_list(stops)}
        values, storage = file_form(stated, model.implementation, self.head)
        if model.implementation == "hf" and model.lora is not None:
            storage = stored  # Merged weights have the form of the files in `path`.
        if _scores_turn_ends(self.paths, self.role):
            values[SCORE_AT] = TURN_END
        return values, _generation(generation_values(model), values, stops), storage

    def _whole(self, trained: RoleCheckpoint) -> ExportedWeights:
        """Return all weights, with merged adapters. Raises UsageError for a changed base model."""
        model = self.model
        if model.lora is None:
            return trained
        assert model.path is not None, "submission rejects adapters without a path"
        kind = ModelConfig if model.implementation == "builtin" else HFConfig
        config = kind.from_hf(config_values(model))
        merged = merged_weights(trained, Path(model.path), config, self.head, model.lora)
        if trained.frozen is not None:
            merged.check_base(trained.frozen, model.dtype)
        return merged

    def _mtp(self, config: Mapping[str, Any]) -> list[TensorEntry]:
        path = Path(self.model.path) if self.model.path and self.head == "lm" else None
        known = path is not None and (states_mtp(config) or not read_headers(path)[1])
        return mtp_entries(open_folder(path), config) if path and known else []

    def _write_adapter(
        self, trained: RoleCheckpoint, target: Path, lora: Lora, checkpoint: Path
    ) -> Path:
        make_private_directory(target.parent)
        theirs = config_values(self.model) if self.model.implementation == "hf" else None
        return write_adapter(
            trained,
            target,
            lora,
            self.head,
            base=str(self.model.path),
            theirs=theirs,
            tokenizer=self._tokenizer(checkpoint),
            precision=Precision(None if self.dtype in ("auto", "source") else self.dtype),
        )

    def _tokenizer(self, checkpoint: Path) -> TokenizerFiles | None:
        """Return the tokenizer with the committed chat template, or None without a tokenizer.

        Commits of older versions lack the template. For these, use `dataset.chat_template`.
        """
        folder = self.model.tokenizer or self.config.actor.tokenizer
        if not folder:
            return None
        state = manifest.read_state(checkpoint, STATE)
        known = "chat_template" in state
        template = state["chat_template"] if known else template_file(self.config.dataset)
        return TokenizerFiles(Path(folder), template)

    def _stop_tokens(self, checkpoint: Path) -> list[int]:
        """Return the committed stop tokens; the model's tokens for commits of older versions."""
        committed = manifest.read_state(checkpoint, STATE).get("stop_token_ids")
        return list(committed if committed is not None else stop_tokens(self.config))


def export_actor(paths: RunPaths, config: Config, commit: Commit) -> Exported:
    """Export a commit to ``export/step-<s>``, from which transformers can load it.

    Raises DamagedCheckpointError before it writes anything.
    """
    settings = config.checkpoint
    head = _head(paths, ROLE)
    exporter = Exporter(paths, config, ROLE, head, settings.export_dtype, settings.export_form)
    return manifest.until_certain(lambda: exporter.write(commit, exporter.folder(commit.step)))


def export_step(
    paths: RunPaths,
    role: str,
    step: int | None,
    target: Path | None,
    dtype: ExportDtype | None = None,
    form: ExportForm | None = None,
) -> Exported:
    """Export a commit of a trial, which may be running.

    By default, export the newest commit into the default folder of its step.

    Raises UsageError if the step or role is unknown, the target exists, or the role has no adapter.
    Raises CheckpointError for a damaged commit; the message names other commits.
    """
    config = load_resolved(paths.config)
    settings, head = config.checkpoint, _head(paths, role)
    dtype = dtype or settings.export_dtype
    exporter = Exporter(paths, config, role, head, dtype, form or settings.export_form)
    if form == "adapter" and exporter.model.lora is None:
        raise UsageError(f"{role} has no adapters, so it has no adapter form: use --form merged")
    if target is not None and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists already: choose a new directory")

    def exported(commit: Commit) -> Exported:
        return exporter.write(commit, target or exporter.folder(commit.step))

    return _of_commit(paths, step, exported, how="with --step")


def pin_actor(paths: RunPaths, step: int | None) -> Path:
    """Return a model folder for other trials, with links to the files of a commit.

    By default, use the newest commit. Links need one file system, so the folder is in the trial's
    directory. Return an existing folder unchanged.

    Raises UsageError (unknown step or no actor), CheckpointError (damaged), EnvironmentFailure.
    """
    exporter = _merged_actor(paths)

    def pinned(commit: Commit) -> Path:
        folder = paths.pinned(commit.directory)
        return folder if manifest.is_pinned(folder) else exporter.pin(commit, folder)

    return _of_commit(paths, step, pinned, how="with @STEP")


def pin_to_evaluate(paths: RunPaths, commit: Commit) -> None:
    """Make a model folder of a commit for `evaluation.tasks`. Raises as `pin_actor`."""
    folder = paths.checkpoint_to_evaluate(commit.directory)
    if not manifest.is_pinned(folder):
        _merged_actor(paths).pin(commit, folder)


def _merged_actor(paths: RunPaths) -> Exporter:
    return Exporter(
        paths, load_resolved(paths.config), ROLE, _head(paths, ROLE), "float32", "merged"
    )


def _of_commit(
    paths: RunPaths, step: int | None, make: Callable[[Commit], Made], *, how: str
) -> Made:
    """Make an export or folder of a commit; take another commit if the run deletes this commit.

    ``how`` names the option that chooses a commit, for the message about a damaged commit.
    """
    while True:
        commit = _choose(paths, step)
        try:
            return make(commit)
        except (CheckpointError, CorruptFileError, EnvironmentFailure) as error:
            left = fold(History(paths.history).read()).commits
            if commit not in left:
                continue
            if isinstance(error, DamagedCheckpointError):
                raise CheckpointError(f"{error}. {_remedy(paths, commit, left, how)}") from error
            raise


def _remedy(paths: RunPaths, damaged: Commit, commits: Sequence[Commit], how: str) -> str:
    others = [commit.step for commit in commits if commit != damaged]
    if not others:
        return "Nothing was written, and there is no other checkpoint"
    steps = ", ".join(map(str, others))
    return (
        f"Nothing was written; choose another checkpoint {how} (available: {steps}); "
        f"`slurmrl checkpoints {paths.experiment}/{paths.trial}` shows which are intact"
    )


def _choose(paths: RunPaths, step: int | None) -> Commit:
    commits = fold(History(paths.history).read()).commits
    if not commits:
        raise UsageError(f"{paths.experiment}/{paths.trial} has no checkpoint yet")
    matching = [commit for commit in commits if step in (None, commit.step)]
    if not matching:
        known = ", ".join(str(commit.step) for commit in commits)
        raise UsageError(f"no checkpoint of step {step}; available: {known}")
    return matching[-1]


def _plan(paths: RunPaths) -> Plan:
    """Return a trial's plan. If its file is damaged or missing, make it from the configuration.

    Raises CorruptFileError or EnvironmentFailure of the file if this is not possible.
    """
    try:
        return Plan.read(paths.plan)
    except (CorruptFileError, EnvironmentFailure) as damage:
        try:
            return make_plan(load_resolved_settings(paths.config), scheduler="local")
        except UsageError:
            raise damage from None


def _head(paths: RunPaths, role: str) -> Head:
    """Return the head of a trained or averaged role. Raises UsageError for another role."""
    models = _plan(paths).models
    trained = sorted(name for name, model in models.items() if model.changes)
    if not trained:
        raise UsageError(
            f"{paths.experiment}/{paths.trial} trains no model: there is nothing to export"
        )
    if role not in trained:
        raise UsageError(f"'{role}' is not in the checkpoints; available: {', '.join(trained)}")
    head: Head = models[role].head
    return head


def _scores_turn_ends(paths: RunPaths, role: str) -> bool:
    """Return whether the role is a reward model that was trained at the ends of turns.

    Older versions of slurmrl trained at the ends of conversations. The call's inputs in the plan
    show which version trained the role. Raises CorruptFileError, EnvironmentFailure.
    """
    if role != ROLE or all(call.interface not in REWARD_MODELS for call in _plan(paths).calls):
        return False
    return any(
        call.interface in REWARD_MODELS and set(call.inputs) == set(REWARD_MODEL_INPUTS)
        for call in Plan.read(paths.plan).calls
    )


def _generation(
    stated: Mapping[str, Any], config: Mapping[str, Any], stops: list[int]
) -> dict[str, Any]:
    """Return the generation config, by default from ``config.json``, with the run's ``stops``."""
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    values = dict(stated) or {"_from_model_config": True, **ids}
    known = values.get(EOS)
    if not stops or set(stops) == set(known if isinstance(known, list) else [known]):
        return values
    values.pop("_from_model_config", None)  # transformers would then use the ids in config.json.
    return {**values, EOS: _one_or_list(stops)}


def _one_or_list(stops: list[int]) -> int | list[int] | None:
    return stops if len(stops) > 1 else next(iter(stops), None)


def _sweep(paths: RunPaths) -> None:
    with suppress(OSError):
        for folder in filter(lambda entry: is_temporary(entry.name), paths.exports.iterdir()):
            if time.time() - folder.stat().st_mtime > LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ExportTypes:
    """The types of an export's tensors."""

    precision: Precision
    name: str
    """Type intended for most tensors."""
    kept: float | None = None
    """Share of the training's update that survives rounding to ``name``. None without rounding, or
    if the initial weights are unknown."""
    rejected: bool = False
    """Whether the export is in float32 because rounding to ``name`` would lose too much."""

    @property
    def warning(self) -> str | None:
        """Warning that rounding loses (or would lose) much of the training's update; else None."""
        if self.rejected and self.kept is None:
            return (
                "exported in float32: the weights that the training started from cannot be read, "
                f"so the loss by rounding to {self.name} is unknown"
            )
        if self.kept is None or self.kept >= ENOUGH:
            return None
        if self.rejected:
            return (
                f"exported in float32: only {self.kept:.1%} of the training's update would survive "
                f"rounding to {self.name}, the type of the model that it started from "
                "(checkpoint.export_dtype: source exports that type anyway)"
            )
        return (
            f"only {self.kept:.1%} of the training's update survives rounding to {self.name}; the "
            "rest is lost in the exported model. Export it again with slurmrl export --dtype "
            "float32, and set checkpoint.export_dtype: auto"
        )


def export_types(
    model: Model, dtype: ExportDtype, weights: ExportedWeights, storage: Storage
) -> ExportTypes:
    """Choose export types and measure the kept share. A small share makes ``auto`` float32."""
    precision = _precision(model, dtype)
    entries = file_entries(weights.weights(), weights.read, storage)
    types = {entry.name: precision.apply(entry).spec.dtype for entry in entries}
    rounded = [entry for entry in entries if types[entry.name] not in (entry.spec.dtype, "float32")]
    if not rounded:
        return ExportTypes(precision, "float32")
    sizes: Counter[str] = Counter()
    for entry in rounded:
        sizes[types[entry.name]] += entry.spec.bytes
    name = sizes.most_common(1)[0][0]
    if model.path is None:
        return ExportTypes(precision, name)
    try:
        start = open_folder(Path(model.path))
        kept = sum((_measured(start, e, types[e.name]) for e in rounded), Survival()).share
        enough = kept is None or kept >= ENOUGH
    except (UsageError, CheckpointError, CorruptFileError):
        kept, enough = None, False
    if dtype == "auto" and not enough:
        return ExportTypes(AS_STORED, name, kept, rejected=True)
    return ExportTypes(precision, name, kept)


def _measured(start: FolderTensors, entry: TensorEntry, dtype: str) -> Survival:
    """Measure the kept share of a tensor's update. Ignore tensors that the initial model lacks."""
    specs = start.specs()
    name = stored_name(entry.name, specs)
    if name is None or specs[name].shape != entry.spec.shape:
        return Survival()
    before = start.read(name, Box.whole(entry.spec.shape))
    return survival(
        widened(before, specs[name].dtype), widened(entry.data(), entry.spec.dtype), dtype
    )


def _precision(model: Model, dtype: ExportDtype) -> Precision:
    if dtype not in ("source", "auto"):
        return Precision(dtype)
    values = config_values(model)
    stated = values.get("dtype") or values.get("torch_dtype")
    tensors = _source_dtypes(Path(model.path)) if model.path is not None else {}
    if stated not in FLOATS:
        common = Counter(tensors.values()).most_common(1)
        stated = common[0][0] if common else None
    return Precision(stated, tensors)


def _source_dtypes(folder: Path) -> Mapping[str, str]:
    """Return the types of the tensors in a model folder, except quantized tensors."""
    inputs.check_folder(folder)
    headers, _ = read_headers(folder)
    return {name: spec.dtype for name, spec in headers.items() if spec.dtype in FLOATS}
