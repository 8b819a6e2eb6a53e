"""Checkpoints as Hugging Face folders. Moves bytes by the layout planner; free of torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.pieces import RoleCheckpoint
from slurmrl.checkpoint.stored import Storage, by_name, file_entries
from slurmrl.checkpoint.tensors import Entry, write_tensors
from slurmrl.errors import CheckpointError, EnvironmentFailure
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import temporary_beside, write_new

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHARD_BYTES = 50 * 10**9
"""Size at which transformers starts a new file."""
Shard = list[Entry]


def export(
    checkpoint: Path,
    role: str,
    config: Mapping[str, Any],
    target: Path,
    *,
    tokenizer: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    storage: Storage = by_name,
    shard_bytes: int = SHARD_BYTES,
    calls: SystemCalls = REAL,
) -> Path:
    """Write ``role`` of a checkpoint directory as a folder that transformers loads.

    ``config`` is the object for config.json and ``generation`` overrides what
    generation_config.json takes from it; ``storage`` says how the files hold the parameters. The
    folder is written under a temporary name and then renamed, so it is whole or not there; an
    older one is replaced. Weights keep the type they are stored in, one tensor is in memory at
    a time.
    """
    weights = RoleCheckpoint(checkpoint, role)
    temporary = temporary_beside(target)
    try:
        calls.mkdir(temporary)
        entries = file_entries(weights.weights(), weights.read, storage)
        write_weights(temporary, entries, shard_bytes=shard_bytes, calls=calls)
        dtype = _dtype(weights)
        _write_json(temporary / "config.json", {**config, "dtype": dtype}, calls)
        values = {**_generation(config), **(generation or {})}
        _write_json(temporary / "generation_config.json", values, calls)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, temporary, calls)
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
    entries: Sequence[Entry],
    *,
    shard_bytes: int = SHARD_BYTES,
    calls: SystemCalls = REAL,
) -> None:
    """The weight files of a model folder, as ``save_pretrained`` of transformers writes them."""
    shards = _shards(entries, shard_bytes)
    names = _shard_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard, {"format": "pt"}, calls=calls)
    if len(shards) > 1:
        places = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
        total = sum(entry.spec.bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / "model.safetensors.index.json", index, calls)


def _shards(entries: Iterable[Entry], limit_bytes: int) -> list[Shard]:
    """Entries in order, in as few runs as the limit allows; a larger tensor stands alone."""
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


def _dtype(weights: RoleCheckpoint) -> str:
    found = {spec.dtype for _, spec in weights.weights()}
    if len(found) != 1:
        raise CheckpointError(f"{weights.directory}: weights of types {sorted(found)}")
    return found.pop()


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    return {"_from_model_config": True, **ids}


def _copy_tokenizer(source: Path, folder: Path, calls: SystemCalls) -> None:
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not names:
        raise CheckpointError(f"{source} holds no tokenizer file")
    for name in names:
        write_new(folder / name, (source / name).read_bytes(), True, calls)


def _write_json(path: Path, values: Mapping[str, Any], calls: SystemCalls) -> None:
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
