"""Export of checkpoints as Hugging Face folders, with the type of each tensor. Torch-free.

`survival` measures the share of the training's update that remains in a narrower type. Such a type
has few values near a weight, so rounding removes an update smaller than half the distance of two
values. In bfloat16, neighboring values differ by about 0.4 %. With ``s`` the weights before the
update, ``t`` the weights after the update, and ``r`` the rounding, the share is

    <r(t) - r(s), t - s> / <t - s, t - s>

It is 1 without rounding and 0 if no rounded weight changes. Rounding errors that are unrelated to
the update cancel out. To first order, the loss changes in proportion to the update, so the share
also predicts how much of the improvement remains.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from slurmrl.errors import CheckpointError, EnvironmentFailure, UnreadableInputError
from slurmrl.fsio import inputs
from slurmrl.fsio.calls import REAL, SystemCalls, explain, temporary_beside, write_new
from slurmrl.tensors.checkpoint.tensors import (
    NUMPY_DTYPES,
    Storage,
    TensorEntry,
    by_name,
    file_entries,
    in_file_order,
    write_tensors,
)
from slurmrl.tensors.layout import Array, Box, TensorSpec

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATES = (CHAT_TEMPLATE, "chat_template.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    *TEMPLATES,
)
INDEX_FILE: Final = "model.safetensors.index.json"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder next to the tokenizer's files with additional chat templates, one in each file."""
SHARD_BYTES = 50 * 10**9
"""Maximum size of a weight file, equal to transformers' default."""
Shard = list[TensorEntry]


FLOATS: Final = ("float32", "bfloat16", "float16")
BLOCK: Final = 2**22
"""Number of elements that are converted at a time, which limits the size of intermediate
results."""
BF16_NAN: Final = 0x7FC0
ENOUGH: Final = 0.9
"""Share of the surviving update below which slurmrl warns."""


EXACT: Final = ("e_score_correction_bias",)
"""Name suffixes of tensors that keep their type: rounding would change the choice of experts."""


class ExportedWeights(Protocol):
    """The weights of a role, such as a ``RoleCheckpoint``."""

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Yield names and specs, in the model's order."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """Return a box of a tensor as a contiguous array; bfloat16 as its bits (uint16)."""
        ...


@dataclass(frozen=True)
class Precision:
    """The type of each floating-point tensor in an export; other tensors keep their types."""

    default: str | None = None
    """Type of tensors that are not in ``tensors``; None keeps the checkpoint's type."""
    tensors: Mapping[str, str] = field(default_factory=dict)

    def apply(self, entry: TensorEntry) -> TensorEntry:
        """Return an entry with its type in the export.

        The entry's ``data`` raises CheckpointError for a finite value that overflows in that type.
        """
        stored = entry.spec.dtype
        bare = entry.name.partition(".")[2]  # Files of models without a head use this name.
        default = None if entry.name.endswith(EXACT) else self.default
        wanted = self.tensors.get(entry.name) or self.tensors.get(bare) or default
        if wanted is None or wanted == stored or stored not in FLOATS:
            return entry
        spec = TensorSpec(entry.spec.shape, wanted)
        return TensorEntry(entry.name, spec, partial(_converted, entry, wanted))


AS_STORED: Final = Precision()


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer's files of an export."""

    source: Path
    """Folder that contains the files."""
    chat_template: str | None = None
    """Template that replaces all templates of the folder; None keeps the folder's templates."""

    def copy(self, folder: Path, calls: SystemCalls) -> None:
        """Copy the files into a folder. Raises UnreadableInputError if there are none."""
        present = inputs.list_names(self.source)
        names = [name for name in TOKENIZER_FILES if name in present]
        if not names:
            raise UnreadableInputError(f"{self.source} has no tokenizer files")
        replaced = () if self.chat_template is None else (TOKENIZER_CONFIG, *TEMPLATES)
        for name in names:
            if name not in replaced:
                self._copy(name, folder, calls)
        if self.chat_template is not None:
            if TOKENIZER_CONFIG in present:
                values = inputs.read_json(self.source / TOKENIZER_CONFIG)
                values.pop("chat_template", None)
                write_json(folder / TOKENIZER_CONFIG, values, calls)
            write_new(folder / CHAT_TEMPLATE, self.chat_template.encode(), True, calls)
        elif MORE_TEMPLATES in present:
            self._copy_more(folder, calls)

    def _copy_more(self, folder: Path, calls: SystemCalls) -> None:
        found = inputs.list_names(self.source / MORE_TEMPLATES)
        templates = sorted(name for name in found if name.endswith(".jinja"))
        if templates:
            calls.mkdir(folder / MORE_TEMPLATES)
            for name in templates:
                self._copy(f"{MORE_TEMPLATES}/{name}", folder, calls)
            calls.fsync_directory(folder / MORE_TEMPLATES)

    def _copy(self, name: str, folder: Path, calls: SystemCalls) -> None:
        write_new(folder / name, inputs.read(self.source / name), True, calls)


def export(
    weights: ExportedWeights,
    config: Mapping[str, Any],
    target: Path,
    *,
    generation: Mapping[str, Any],
    tokenizer: TokenizerFiles | None = None,
    storage: Storage = by_name,
    more: Sequence[TensorEntry] = (),
    precision: Precision = AS_STORED,
    shard_bytes: int = SHARD_BYTES,
    calls: SystemCalls = REAL,
) -> Path:
    """Write a role of a checkpoint as a folder that transformers loads.

    ``config`` and ``generation`` are the objects for config.json and generation_config.json.
    ``storage`` maps parameters to tensors of the files. ``more`` adds tensors whose names the role
    does not have. ``precision`` gives the types. The folder is complete or absent; an existing
    folder is replaced. One tensor is in memory at a time. (`open_verified` opens a checkpoint after
    verifying its files.)
    """

    def fill(folder: Path) -> None:
        stored = file_entries(weights.weights(), weights.read, storage)
        names = {entry.name for entry in stored}
        others = (entry for entry in more if entry.name not in names)
        entries = [precision.apply(entry) for entry in (*stored, *others)]
        write_weights(folder, entries, shard_bytes=shard_bytes, calls=calls)
        write_json(folder / "config.json", {**config, "dtype": _main_dtype(entries)}, calls)
        write_json(folder / "generation_config.json", generation, calls)
        if tokenizer is not None:
            tokenizer.copy(folder, calls)

    return write_folder(target, fill, calls)


def write_folder(target: Path, fill: Callable[[Path], None], calls: SystemCalls = REAL) -> Path:
    """Make a folder that is complete or absent; replace an existing folder.

    ``fill`` writes the files into a folder with a temporary name, which is then renamed. Raises
    EnvironmentFailure.
    """
    temporary = temporary_beside(target)
    try:
        calls.mkdir(temporary)
        fill(temporary)
        calls.fsync_directory(temporary)
        _publish(temporary, target, calls)
    except EnvironmentFailure:
        raise
    except OSError as error:
        raise explain(error, "write", target) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def write_weights(
    folder: Path,
    entries: Sequence[TensorEntry],
    *,
    shard_bytes: int = SHARD_BYTES,
    calls: SystemCalls = REAL,
) -> None:
    """Write the weight files of a model folder as transformers' ``save_pretrained`` does."""
    shards = _shards(entries, shard_bytes)
    names = _shard_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, {"format": "pt"}, calls=calls)
    if len(shards) > 1:
        places = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
        write_index(folder, places, sum(entry.spec.bytes for entry in entries), calls)


def write_index(folder: Path, places: Mapping[str, str], size: int, calls: SystemCalls) -> None:
    """Write the index of a model folder: the file of each tensor, and the size of all tensors."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / INDEX_FILE, index, calls)


def in_written_order(
    entries: Iterable[TensorEntry], shard_bytes: int = SHARD_BYTES
) -> Iterator[TensorEntry]:
    """Yield the tensors in the order in which `write_weights` reads them."""
    for shard in _shards(entries, shard_bytes):
        yield from in_file_order(shard)


def _shards(entries: Iterable[TensorEntry], limit_bytes: int) -> list[Shard]:
    """Split entries into files of at most ``limit_bytes``. A larger tensor gets a separate file."""
    shards: list[Shard] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.spec.bytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.spec.bytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _main_dtype(entries: Iterable[TensorEntry]) -> str:
    """Return the floating-point type with the most bytes, which config.json names."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        if entry.spec.dtype in FLOATS:
            sizes[entry.spec.dtype] += entry.spec.bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def write_json(path: Path, values: Mapping[str, Any], calls: SystemCalls) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_new(path, text.encode(), True, calls)


def _publish(temporary: Path, target: Path, calls: SystemCalls) -> None:
    if os.path.lexists(target):
        old = temporary_beside(target)
        calls.rename(target, old)
        calls.rename(temporary, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        calls.rename(temporary, target)
    calls.fsync_directory(target.parent)


def _converted(entry: TensorEntry, wanted: str) -> Array:
    values = entry.data()
    flat = values.reshape(-1)
    target = np.empty(flat.shape, dtype=NUMPY_DTYPES[wanted])
    for begin in range(0, flat.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        wide = widened(flat[block], entry.spec.dtype)
        target[block] = narrow = narrowed(wide, wanted)
        lost = np.isinf(widened(narrow, wanted)) & np.isfinite(wide)
        if lost.any():
            value = float(wide[lost][0])
            raise CheckpointError(
                f"'{entry.name}' has the value {value:g}, which overflows in {wanted}: choose "
                "another type"
            )
    return target.reshape(values.shape)


def widened(values: Array, dtype: str) -> Array:
    """Return values of type ``dtype`` as float32, without rounding."""
    if dtype == "bfloat16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)


def narrowed(wide: Array, dtype: str) -> Array:
    """Return float32 values as ``dtype``. Round to nearest, ties to even, as torch does."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(wide, dtype=NUMPY_DTYPES[dtype])
    bits = wide.view("<u4")
    rounded: Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(wide)] = BF16_NAN
    return rounded


@dataclass(frozen=True)
class Survival:
    """The two sums of `survival` over weights. Results of several tensors or ranks can be added."""

    kept: float = 0.0
    """<r(t) - r(s), t - s>."""
    whole: float = 0.0
    """<t - s, t - s>."""

    def __add__(self, other: Survival) -> Survival:
        return Survival(self.kept + other.kept, self.whole + other.whole)

    @property
    def share(self) -> float | None:
        """Share of the update that remains, from 0 to 1; None without an update."""
        if not self.whole:
            return None
        return min(max(self.kept / self.whole, 0.0), 1.0)


def survival(start: Array, trained: Array, dtype: str) -> Survival:
    """Return how much of the update from ``start`` to ``trained`` remains in ``dtype``.

    Both arrays are float32 and have the same shape.
    """
    before, after = start.reshape(-1), trained.reshape(-1)
    total = Survival()
    for begin in range(0, after.size, BLOCK):
        block = slice(begin, begin + BLOCK)
        update = after[block].astype("f8") - before[block]
        rounded = _rounded(after[block], dtype) - _rounded(before[block], dtype)
        total += Survival(float(rounded @ update), float(update @ update))
    return total


def _rounded(values: Array, dtype: str) -> Array:
    return widened(narrowed(values, dtype), dtype).astype("f8")
