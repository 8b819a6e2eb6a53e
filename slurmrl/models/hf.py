"""Hugging Face model folders as a source of weights, read box by box.

Whole files are never loaded: safetensors maps them, and only the bytes of a box are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.models.config import ModelConfig
from slurmrl.models.shapes import EMBEDDING, LM_HEAD

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


def read_config(folder: Path) -> ModelConfig:
    """The architecture of a model folder; UsageError where it is not one or not one of ours."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UsageError(f"{folder} is not a Hugging Face model folder: it has no {CONFIG_FILE}")
    return ModelConfig.from_hf(_read_json(path))


class TensorSource:
    """The tensors of one model folder. A context manager; files are opened on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _index(folder)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; later reads open them again."""
        self._open.clear()

    def names(self) -> list[str]:
        """Names in the files, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Tensor:
        """The box of ``size`` at ``start`` (both or neither: the whole), in the file's dtype.

        Raises UsageError for a name that is not there or a box that sticks out.
        """
        view, shape = self._slice(name), self.shape(name)
        first = start if start is not None else (0,) * len(shape)
        extent = size if size is not None else shape
        if not _fits(first, extent, shape):
            raise UsageError(f"{name} has shape {shape}: no box of {extent} at {first}")
        box: Tensor = view[tuple(slice(s, s + n) for s, n in zip(first, extent, strict=True))]
        return box

    def _slice(self, name: str) -> Any:
        name = self._stored_name(name)
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file].get_slice(name)

    def _stored_name(self, name: str) -> str:
        """Tied language-model heads are not in the files: they are the embedding."""
        if name in self._file_of:
            return name
        if name == LM_HEAD and EMBEDDING in self._file_of:
            return EMBEDDING
        raise UsageError(f"{self._folder} has no tensor '{name}' ({len(self._file_of)} others)")


def _fits(start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(start) == len(size) == len(shape) and all(
        min(s, n) >= 0 and s + n <= total for s, n, total in zip(start, size, shape, strict=True)
    )


def _index(folder: Path) -> dict[str, str]:
    """File of each tensor."""
    if (folder / INDEX_FILE).is_file():
        mapping = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(mapping, dict):
            raise CorruptFileError(f"{folder / INDEX_FILE}: no weight_map")
        return mapping
    if (folder / SINGLE_FILE).is_file():
        with safe_open(folder / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    raise UsageError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CorruptFileError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise CorruptFileError(f"{path}: not a JSON object")
    return values
