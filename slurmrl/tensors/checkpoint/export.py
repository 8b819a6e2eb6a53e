"""Export of checkpoints as Hugging Face folders. Torch-free."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slurmrl.errors import EnvironmentFailure, UnreadableInputError
from slurmrl.fsio import inputs
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import temporary_beside, write_new
from slurmrl.tensors.checkpoint.precision import AS_STORED, FLOATS, Precision
from slurmrl.tensors.checkpoint.stored import Storage, by_name, file_entries
from slurmrl.tensors.checkpoint.tensors import TensorEntry, in_file_order, write_tensors
from slurmrl.tensors.layout.box import Box
from slurmrl.tensors.layout.copy import Array
from slurmrl.tensors.layout.layout import TensorSpec

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
    *TEMPLATES,
)
MORE_TEMPLATES = "additional_chat_templates"
"""Folder beside the tokenizer's files with additional chat templates, one in each file."""
SHARD_BYTES = 50 * 10**9
"""Maximum size of a weight file in transformers."""
Shard = list[TensorEntry]


class ExportedWeights(Protocol):
    """The weights of a role, such as those of a ``RoleCheckpoint``."""

    def weights(self) -> Iterable[tuple[str, TensorSpec]]:
        """Names and specs, in the model's order."""
        ...

    def read(self, name: str, box: Box) -> Array:
        """A box of a tensor, contiguous; bfloat16 as its bits (uint16)."""
        ...


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer's files of an export."""

    source: Path
    """The folder that has them."""
    chat_template: str | None = None
    """The template to write in place of all templates of the folder; None keeps these."""

    def copy(self, folder: Path, calls: SystemCalls) -> None:
        """Write the files into a folder. Raises UnreadableInputError if there are none."""
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
    precision: Precision = AS_STORED,
    shard_bytes: int = SHARD_BYTES,
    calls: SystemCalls = REAL,
) -> Path:
    """Write a role of a checkpoint as a folder that transformers loads. (`open_verified` opens a
    checkpoint after verifying its files.)

    ``config`` is the object for config.json, ``generation`` that for generation_config.json.
    ``storage`` maps parameters to tensors of the files, and ``precision`` gives their types. The
    folder is complete or absent; an existing one is replaced. One tensor is in memory at a time.
    """

    def fill(folder: Path) -> None:
        stored = file_entries(weights.weights(), weights.read, storage)
        entries = [precision.apply(entry) for entry in stored]
        write_weights(folder, entries, shard_bytes=shard_bytes, calls=calls)
        write_json(folder / "config.json", {**config, "dtype": _main_dtype(entries)}, calls)
        write_json(folder / "generation_config.json", generation, calls)
        if tokenizer is not None:
            tokenizer.copy(folder, calls)

    return write_folder(target, fill, calls)


def write_folder(target: Path, fill: Callable[[Path], None], calls: SystemCalls = REAL) -> Path:
    """Make a folder that is complete or absent: ``fill`` writes its files under a temporary name,
    which is then renamed. An existing folder is replaced. Raises EnvironmentFailure."""
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
    """Write the weight files of a model folder like ``save_pretrained`` of transformers."""
    shards = _shards(entries, shard_bytes)
    names = _shard_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, {"format": "pt"}, calls=calls)
    if len(shards) > 1:
        places = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
        total = sum(entry.spec.bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_json(folder / "model.safetensors.index.json", index, calls)


def in_written_order(
    entries: Iterable[TensorEntry], shard_bytes: int = SHARD_BYTES
) -> Iterator[TensorEntry]:
    """The order in which `write_weights` reads tensors."""
    for shard in _shards(entries, shard_bytes):
        yield from in_file_order(shard)


def _shards(entries: Iterable[TensorEntry], limit_bytes: int) -> list[Shard]:
    """Split entries, in order, into as few files as the limit allows. A larger tensor gets its own
    file."""
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
    """The floating-point type of most bytes, which config.json states as the model's."""
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
