"""The tensors of a model folder. Torch-free.

This module reads the headers and values of safetensors files, the values of a pinned checkpoint,
and weights with their adapters merged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from slurmrl.config.schema.roles import Lora
from slurmrl.errors import CheckpointError, CorruptFileError, UsageError
from slurmrl.fsio import inputs
from slurmrl.models.adapters import (
    LORA_A,
    LORA_B,
    adapted_weights,
    check_unchanged,
    matrix_name,
    merge,
    shown,
    tensor_sum,
)
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig, stored
from slurmrl.models.hf_merged import MergedFolder
from slurmrl.models.shapes import (
    EMBEDDING,
    LM_HEAD,
    VALUE_HEAD,
    FolderTensors,
    TrainedTensors,
    constant_specs,
    file_form,
    storage_of,
    stored_shapes,
)
from slurmrl.tensors.checkpoint.export import BLOCK, INDEX_FILE, ExportedWeights, narrowed, widened
from slurmrl.tensors.checkpoint.manifest import PinnedOrigin, is_pinned, read_origin
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import (
    CODES,
    NUMPY_DTYPES,
    Storage,
    TensorFile,
    TensorSlice,
    file_tensors,
)
from slurmrl.tensors.layout import Array, Box, TensorSpec, blocks

SINGLE_FILE: Final = "model.safetensors"
FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
"""Data types from which weights are read. Other types are quantized, which no engine trains."""
HARMLESS: Final = (LM_HEAD, VALUE_HEAD, "rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
"""Suffixes of the names of tensors that may be ignored: heads that the role does not use, and
constants that the decoder computes."""
SHOWN: Final = 5


def weight_files(folder: Path) -> dict[str, set[str]]:
    """Return the files with the weights, and the tensors that the index lists for each file.

    The set is empty for a single file without an index. Raises UsageError.
    """
    names = inputs.list_names(folder)
    if INDEX_FILE not in names:
        if SINGLE_FILE in names:
            return {SINGLE_FILE: set()}
        raise inputs.missing(
            folder / SINGLE_FILE,
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not "
            "supported: load the model with transformers and save it with save_pretrained",
        )
    mapping = inputs.read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise UsageError(f"{folder / INDEX_FILE} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, file in mapping.items():
        files.setdefault(str(file), set()).add(name)
    return files


def read_headers(folder: Path) -> tuple[dict[str, TensorSpec], list[str]]:
    """Return a mapping from names to a model folder's tensors, and the problems of its files."""
    try:
        if is_pinned(folder):
            return PinnedTensors(folder).specs(), []
        files = weight_files(folder)
    except (UsageError, CheckpointError, CorruptFileError) as error:
        return {}, [str(error)]
    headers: dict[str, TensorSpec] = {}
    problems = []
    for file, names in files.items():
        try:
            held = _opened_file(folder / file).specs
        except FileNotFoundError:
            reason = f"{INDEX_FILE} names it"
            if (folder / file).is_symlink():
                reason = f"a symbolic link points to {(folder / file).readlink()}"
            problems.append(f"{folder / file} is missing, but {reason}")
            continue
        except UsageError as error:
            problems.append(str(error))
            continue
        except (OSError, CorruptFileError) as error:
            problems.append(f"{folder / file} is damaged or truncated: {error}")
            continue
        if absent := sorted(names - held.keys()):
            problems.append(f"{folder / file} lacks {_some(absent)}, which {INDEX_FILE} lists")
        headers |= held
    return headers, problems


def mismatches(headers: Mapping[str, TensorSpec], config: ModelConfig, head: Head) -> list[str]:
    """Return a message for each kind of difference between weights and architecture."""
    missing, other, quantized = [], [], []
    for name, shape in implied_shapes(config, head).items():
        stored = stored_name(name, headers)
        header = None if stored is None else headers[stored]
        if header is None:
            missing += [name] if name != VALUE_HEAD else []
        elif header.shape != shape:
            other.append(f"{name} {list(header.shape)} instead of {list(shape)}")
        elif header.dtype not in FLOATS:
            quantized.append(f"{name} ({CODES.get(header.dtype, header.dtype)})")
    messages = []
    if missing:
        messages.append(f"the files lack {_some(missing)}, which config.json implies")
    if other:
        messages.append(f"shapes contradict config.json: {_some(other)}")
    if quantized:
        floats = ", ".join(CODES[dtype] for dtype in FLOATS)
        messages.append(f"{_some(quantized)}: quantized weights are not supported, only {floats}")
    return messages


def stored_name(name: str, names: Container[str]) -> str | None:
    """Return a tensor's name in files, where its first part may be missing; None if not found."""
    return next((n for n in (name, name.partition(".")[2]) if n in names), None)


def unused(headers: Mapping[str, TensorSpec], config: ModelConfig, head: Head) -> list[str]:
    """Return the tensors of the files that the architecture does not use."""
    shapes = implied_shapes(config, head)
    known = {*shapes, *(name.partition(".")[2] for name in shapes)}
    return sorted(name for name in headers if name not in known and not name.endswith(HARMLESS))


def implied_shapes(config: ModelConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Return a mapping from each tensor that the files must have to its shape."""
    specs = [
        (name, TensorSpec(shape, "float32")) for name, shape in stored_shapes(config, head).items()
    ]
    tensors = file_tensors(specs, storage_of(config))
    return {name: tuple(tensor.spec.shape) for name, tensor in tensors.items()}


def _opened_file(path: Path) -> TensorFile:
    """Open a file of weights.

    Raises:
    - FileNotFoundError or OSError;
    - CorruptFileError, for example for a truncated file;
    - UsageError for a file without weights.
    """
    with inputs.opened(path):  # Missing files and folders raise different errors.
        inputs.check_file(path)
    return TensorFile(path)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def open_folder(folder: Path) -> FolderTensors:
    """Open the weights of a folder, which may be a pinned checkpoint.

    Raises UsageError, CheckpointError or CorruptFileError if the folder has no readable weights.
    """
    if is_pinned(folder):
        return PinnedTensors(folder)
    return SafetensorsFolder(folder)


class SafetensorsFolder:
    """The tensors of a folder with one safetensors file, or with several and an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, TensorFile] = {}
        for file, listed in weight_files(folder).items():
            try:
                opened = _opened_file(folder / file)
            except OSError as error:
                raise inputs.unreadable(error, folder / file) from error
            if absent := sorted(listed - opened.specs.keys()):
                raise CorruptFileError(f"{opened.path} lacks {_some(absent)}")
            self._files |= dict.fromkeys(listed or opened.specs, opened)

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: file.specs[name] for name, file in self._files.items()}

    def read(self, name: str, box: Box) -> Array:
        file = self._files[name]
        file.release()  # Free the memory of earlier reads.
        return np.asarray(file.flat(name).reshape(file.specs[name].shape)[box.slices])

    def file(self, name: str) -> Path:
        return self._files[name].path


class PinnedTensors:
    """The tensors of a pinned checkpoint. Adapters are merged into the weights."""

    def __init__(self, folder: Path) -> None:
        """Open the checkpoint.

        Raises CheckpointError or CorruptFileError for files that do not belong together, and
        UsageError if the adapters' model is missing.
        """
        self.folder = folder
        origin = read_origin(folder)
        values = inputs.read_json(folder / "config.json")
        self._dtype = origin.dtype
        self._trained = RoleCheckpoint(folder, origin.role)
        self._weights, storage = _opened(self._trained, origin, values)
        self._tensors = file_tensors(self._weights.weights(), storage)

    def specs(self) -> dict[str, TensorSpec]:
        """Return a mapping from names to the specs of tensors."""
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    def check_base(self) -> None:
        """Raise UsageError if the adapters were trained on a different model.

        The check reads all weights of the model to which the adapters belong.
        """
        frozen, weights = self._trained.frozen, self._weights
        if isinstance(weights, MergedCheckpoint | MergedFolder) and frozen and self._dtype:
            weights.check_base(frozen, self._dtype)

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a tensor, contiguous; bfloat16 as its bits (uint16)."""
        tensor = self._tensors[name]
        target = np.empty(box.size, NUMPY_DTYPES[tensor.spec.dtype])
        for parameter, spec, part in tensor.shards:
            common = part.box(part.of(spec.shape)).intersect(box)
            if common is None:
                continue
            values = self._weights.read(parameter, part.parameter(common))
            # The ellipsis makes a view even of a scalar.
            place: tuple[Any, ...] = (*common.inside(box), ...)
            target[place] = part.arranged(values)
        return target

    def file(self, name: str) -> Path:
        """Return the folder, because each rank's file holds a part of the tensor."""
        return self._trained.directory


def _opened(
    trained: RoleCheckpoint, origin: PinnedOrigin, values: dict[str, Any]
) -> tuple[ExportedWeights, Storage]:
    head: Head = "value" if origin.head == "value" else "lm"
    hf = origin.implementation == "hf"
    config = HFConfig.from_hf(values) if hf else ModelConfig.from_hf(values)
    if isinstance(config, ModelConfig):
        storage = storage_of(config)
    elif origin.lora is None:
        storage = file_form(values, "hf", head)[1]
    else:
        storage = stored  # Adapters are merged into the base model's tensors.
    if origin.lora is None:
        return trained, storage
    if origin.base is None or not Path(origin.base).is_dir():
        raise UsageError(
            f"the adapters of {origin.trial} belong to the model {origin.base}, which is missing"
        )
    lora = Lora.model_validate(dict(origin.lora))
    return merged_weights(trained, Path(origin.base), config, head, lora), storage


def merged_weights(
    trained: TrainedTensors, folder: Path, config: ModelConfig | HFConfig, head: Head, lora: Lora
) -> MergedCheckpoint | MergedFolder:
    """Return the weights of ``folder`` merged with adapters.

    Raises UsageError if the folder has no weights of this architecture.
    """
    if isinstance(config, HFConfig):
        return MergedFolder(trained, open_folder(folder), config, head, lora.scale)
    return MergedCheckpoint(trained, folder, config, head, lora)


class FolderParameters:
    """The parameters of a model folder, under the decoder's names."""

    def __init__(self, folder: Path, config: ModelConfig, head: Head) -> None:
        """Open the files, which may lack the value head.

        Raises UsageError if the files do not match the config (`mismatches`).
        """
        self.folder = folder
        self._tensors = open_folder(folder)
        self._specs = self._tensors.specs()
        if problems := mismatches(self._specs, config, head):
            raise UsageError(f"{folder}: {'; '.join(problems)}")
        self._shapes = stored_shapes(config, head)
        self._storage = storage_of(config)

    def stored(self, name: str) -> list[str]:
        """Return the names of the tensors that store a parameter; [] for a missing value head."""
        parts = self._storage(name, self._shapes[name])
        found = (stored_name(part.tensor, self._specs) for part in parts)
        return [each for each in found if each is not None]

    def dtype(self, name: str) -> str:
        """Return the data type in which a parameter is stored."""
        return self._specs[self.stored(name)[0]].dtype

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a parameter, in its stored type; bfloat16 as its bits (uint16)."""
        parts, stored = self._storage(name, self._shapes[name]), self.stored(name)
        if parts[0].part is None:
            return self._part(parts[0], stored[0], box)
        values = np.empty(box.size, NUMPY_DTYPES[self.dtype(name)])
        for index in range(box.size[0]):
            row = box.start[0] + index
            one = Box((row, *box.start[1:]), (1, *box.size[1:]))
            values[index] = self._part(parts[row], stored[row], one)[0]
        return values

    def _part(self, part: TensorSlice, stored: str, box: Box) -> Array:
        return part.restored(self._tensors.read(stored, part.box(box)))


class MergedCheckpoint:
    """Weights for an export: W + scale * B A in float32, and other trained tensors.

    Raises UsageError if the folder has no weights of this architecture.
    """

    def __init__(
        self, trained: TrainedTensors, folder: Path, config: ModelConfig, head: Head, lora: Lora
    ) -> None:
        inputs.check_folder(folder)
        self._frozen = FolderParameters(folder, config, head)
        self._config, self._trained, self._scale = config, trained, lora.scale
        self._trained_specs = dict(trained.weights())
        self._shapes = stored_shapes(config, head)
        self._adapted = {name for name, _ in adapted_weights(config, lora)}

    def weights(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield names and specs of all parameters, in the model's order."""
        return ((name, TensorSpec(shape, "float32")) for name, shape in self._shapes.items())

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a parameter, merged, in float32. Raises CheckpointError, UsageError."""
        if name in self._trained_specs:
            return self._trained.read(name, box)
        values = self._wide(name, box)
        if name not in self._adapted:
            return values
        rows, columns = zip(box.start, box.size, strict=True)
        rank = self._trained_specs[matrix_name(name, LORA_A)].shape[0]
        a = self._trained.read(matrix_name(name, LORA_A), Box((0, columns[0]), (rank, columns[1])))
        b = self._trained.read(matrix_name(name, LORA_B), Box((rows[0], 0), (rows[1], rank)))
        merged = np.empty(box.size, "<f4")
        merge(merged, values, b, a, self._scale)
        return merged

    def check_base(self, fingerprint: str, dtype: str) -> None:
        """Raise UsageError if the folder has changed since the adapters were trained.

        In training, the weights were rounded to ``dtype`` and had this fingerprint.
        """
        check_unchanged(self._frozen.folder, fingerprint, self._fingerprint(dtype))

    def _fingerprint(self, dtype: str) -> str:
        total, constants = 0, constant_specs(self._config)
        for name, shape in self._shapes.items():
            if name in self._trained_specs:
                continue
            stored = constants[name].dtype if name in constants else dtype
            total += tensor_sum(name, shape, partial(self._narrow, name, stored))
        return shown(total)

    def _narrow(self, name: str, dtype: str, box: Box) -> Array:
        return narrowed(self._wide(name, box), dtype)

    def _wide(self, name: str, box: Box) -> Array:
        """Return a box of a parameter of the folder, in float32."""
        values = widened(self._frozen.read(name, box), self._frozen.dtype(name))
        return np.ascontiguousarray(values)


LARGEST: Final = 3.3895313892515355e38
"""Largest number in bfloat16. A larger weight would become infinite."""
SMALL_BYTES: Final = 64 * 2**20
"""Maximum number of bytes that `small_not_finite` reads from a folder before a submission."""


def not_finite(folder: Path, names: Iterable[str]) -> str | None:
    """Return a message about the first of these tensors that has NaN or infinite values.

    Return None if all are finite. Raises UsageError, CheckpointError, CorruptFileError.
    """
    tensors = open_folder(folder)
    specs = tensors.specs()
    for name in names:
        spec = specs[name]
        nans = infinite = 0
        for box in blocks(Box.whole(spec.shape), BLOCK):
            with np.errstate(over="ignore"):
                values = widened(tensors.read(name, box), spec.dtype)
            nans += int(np.isnan(values).sum())
            infinite += int((np.abs(values) > LARGEST).sum())
        if nans or infinite:
            size = Box.whole(spec.shape).count
            return (
                f"{tensors.file(name)}: tensor '{name}' has {nans} NaN and {infinite} infinite "
                f"values of {size}, and weights must be finite numbers. Either the training that "
                "wrote them diverged, or the file is damaged: use other weights, or copy it again"
            )
    return None


def small_not_finite(
    folder: Path, config: ModelConfig, head: Head, limit: int = SMALL_BYTES
) -> str | None:
    """Return `not_finite` of a model's smallest tensors, up to ``limit`` bytes in total.

    If training has diverged, small tensors also have NaN.
    """
    specs = open_folder(folder).specs()
    stored = (stored_name(name, specs) for name in implied_shapes(config, head))
    used = {name for name in stored if name is not None}
    small = []
    for name in sorted(used, key=lambda name: (specs[name].bytes, name)):
        limit -= specs[name].bytes
        if limit < 0:
            break
        small.append(name)
    return not_finite(folder, small)


def other_projection(folder: Path, config: ModelConfig, head: Head) -> str | None:
    """Return why a tied model cannot be loaded; None if it can.

    If the projection in the files is not the embedding, transformers uses the projection in spite
    of config.json, but slurmrl would not. Raises UsageError, CheckpointError, CorruptFileError.
    """
    if head != "lm" or not config.tie_embeddings:
        return None
    tensors = open_folder(folder)
    specs = tensors.specs()
    shape = (config.vocab_size, config.hidden_size)
    (embedding,) = storage_of(config)(EMBEDDING, shape)
    name = stored_name(embedding.tensor, specs)
    if LM_HEAD not in specs or name is None or same_values(tensors, LM_HEAD, name):
        return None
    return not_tied(LM_HEAD, name)


def same_values(tensors: FolderTensors, one: str, other: str) -> bool:
    """Return whether two tensors of a folder have the same shape and values."""
    first, second = (tensors.specs()[name] for name in (one, other))

    def read(name: str, box: Box) -> Array:
        return widened(tensors.read(name, box), tensors.specs()[name].dtype)

    return first.shape == second.shape and all(
        np.array_equal(read(one, box), read(other, box), equal_nan=True)
        for box in blocks(Box.whole(first.shape), BLOCK)
    )


def not_tied(name: str, other: str) -> str:
    """Return a message about a tensor that differs from its tied tensor in the files."""
    return (
        f"config.json ties the embeddings (tie_word_embeddings), but {name} and {other} differ in "
        f"the files: set tie_word_embeddings to false in config.json, or remove {name}"
    )
