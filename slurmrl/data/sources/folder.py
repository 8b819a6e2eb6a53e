"""Folders of Parquet files, and folders that Hugging Face `datasets` has saved. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from slurmrl.errors import ConfigError, Problem
from slurmrl.fsio import inputs
from slurmrl.registry import near

SPLITS, SAVED = "dataset_dict.json", "state.json"
NAMES_OF_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_SHARD = re.compile(r"(.+?)(-\d+-of-\d+)?\.parquet")


def arrow_files(path: Path, split: str | None) -> Sequence[Path]:
    """The Arrow or Parquet files of a dataset, in order.

    :raises ConfigError: a folder without a dataset, or without this split.
    :raises UnreadableInputError: the folder cannot be read.
    """
    if not path.is_dir():
        _check_split(path, split, [])
        return [path]
    names = inputs.list_names(path)
    if SPLITS in names:
        splits = inputs.read_json(path / SPLITS).get("splits", [])
        _check_split(path, split, splits)
        return _saved(path / str(split or splits[0]))
    if SAVED in names:
        own = inputs.read_json(path / SAVED).get("_split")
        _check_split(path, split, [own] if own else [])
        return _saved(path)
    shards = {name: _split_of(match) for name in sorted(names) if (match := _SHARD.fullmatch(name))}
    if not shards:
        raise ConfigError((Problem("", "path", f"'{path}' is not allowed: {no_dataset(path)}"),))
    splits = [name or "(others)" for name in dict.fromkeys(shards.values())]
    _check_split(path, split, splits if any(shards.values()) else [])
    return [path / name for name, of in shards.items() if split in (None, of)]


def no_dataset(path: Path) -> str:
    """Return why a folder is no dataset; "" if it may be one. Raises UnreadableInputError."""
    names = sorted(inputs.list_names(path))
    if any(name in (SPLITS, SAVED) or _SHARD.fullmatch(name) for name in names):
        return ""
    files = [name for name in names if name.endswith(ROWS)]
    remedy = f"; name one of its files, such as {files[0]}, or several as sources" if files else ""
    return f"it is a folder without {SPLITS}, {SAVED} or *.parquet{remedy}"


def _split_of(match: re.Match[str]) -> str:
    """``train`` of ``train.parquet`` and ``train-00000-of-00002.parquet``; "" for other names."""
    return match[1] if match[2] or match[1] in NAMES_OF_SPLITS else ""


def _saved(folder: Path) -> Sequence[Path]:
    """The files of a `Dataset` that was saved."""
    state = inputs.read_json(folder / SAVED)
    files = [str(each["filename"]) for each in state.get("_data_files") or []]
    if not files or state.get("_indices_data_files"):
        message = f"'{folder}' is not allowed: it was not saved by datasets.save_to_disk as a whole"
        raise ConfigError((Problem("", "path", message),))
    return [folder / Path(name).name for name in files]


def _check_split(path: Path, split: str | None, splits: Sequence[str]) -> None:
    if split is None and len(splits) > 1:
        message = f"is required: {path} has the splits {', '.join(splits)}"
    elif split is not None and split not in splits:
        has = near(split, list(splits)) if splits else f"{path} has no splits"
        message = f"'{split}' is not allowed; {has}"
    else:
        return
    raise ConfigError((Problem("", "split", message),))
