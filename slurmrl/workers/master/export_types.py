"""The types of the weights in an export, and what they keep of the training. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmrl.config.schema import Model
from slurmrl.config.schema.config import ExportDtype
from slurmrl.errors import CheckpointError, CorruptFileError, UsageError
from slurmrl.fsio import inputs
from slurmrl.models.folder_tensors import FolderTensors, open_folder
from slurmrl.models.headers import read_headers, stored_name
from slurmrl.plan.model_files import config_values
from slurmrl.tensors.checkpoint.export import ExportedWeights
from slurmrl.tensors.checkpoint.precision import AS_STORED, FLOATS, Precision, widened
from slurmrl.tensors.checkpoint.stored import Storage, file_entries
from slurmrl.tensors.checkpoint.tensors import DTYPES, TensorEntry
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.weights.survival import ENOUGH, Survival, survival


@dataclass(frozen=True)
class ExportTypes:
    """The types of an export's tensors."""

    precision: Precision
    name: str
    """The type that most tensors were to get."""
    kept: float | None = None
    """The share of the training's update that survives rounding to ``name``. None if nothing is
    rounded, or the weights before the training are unknown."""
    refused: bool = False
    """Whether the export is in float32, because ``name`` keeps too little."""

    @property
    def warning(self) -> str | None:
        """What to say about an export that loses, or would have lost, much of the update."""
        if self.refused and self.kept is None:
            return (
                "exported in float32: the weights that the training started from cannot be read, "
                f"so the loss by rounding to {self.name} is unknown"
            )
        if self.kept is None or self.kept >= ENOUGH:
            return None
        if self.refused:
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
    """Choose the types of an export of ``weights``, and measure what they keep. ``auto`` is the
    model's own types if they keep enough of the update, else float32."""
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
        return ExportTypes(AS_STORED, name, kept, refused=True)
    return ExportTypes(precision, name, kept)


def _measured(start: FolderTensors, entry: TensorEntry, dtype: str) -> Survival:
    """Measure one tensor. A tensor that training has added has no update."""
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
    """The types of the tensors in a model folder's files; quantised ones are left out."""
    inputs.check_folder(folder)
    headers, _ = read_headers(folder)
    dtypes = {name: DTYPES.get(header.dtype, "") for name, header in headers.items()}
    return {name: dtype for name, dtype in dtypes.items() if dtype in FLOATS}
