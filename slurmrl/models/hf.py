"""Hugging Face model folders: weights are read box by box and written tensor by tensor.

Files are memory-mapped by safetensors, and only the bytes of a box are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.fsio import inputs
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.models.folder_checks import LARGEST, not_finite, other_projection
from slurmrl.models.model_tensors import (
    SINGLE_FILE,
    Header,
    PinnedTensors,
    mismatches,
    stored_name,
    weight_files,
)
from slurmrl.models.shapes import VALUE_HEAD, parameter_shapes, storage_of
from slurmrl.tensors.checkpoint.export import SHARD_BYTES, write_weights
from slurmrl.tensors.checkpoint.manifest import is_pinned
from slurmrl.tensors.checkpoint.tensors import CODES, TensorSlice, file_entries
from slurmrl.tensors.layout import Array, Box, TensorSpec

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> ModelConfig:
    """The architecture of a model folder.

    Raises UsageError if the folder is not a model or its family is not supported.
    """
    return ModelConfig.from_hf(read_values(folder))


def read_values(folder: Path) -> dict[str, Any]:
    """The ``config.json`` object of a model folder. Raises UsageError if there is none."""
    if CONFIG_FILE not in inputs.list_names(folder):
        raise inputs.missing(
            folder / CONFIG_FILE,
            f"{folder} is not a Hugging Face model folder: it has no {CONFIG_FILE}",
        )
    return inputs.read_json(folder / CONFIG_FILE)


class Tensors(Protocol):
    """The tensors of a model folder."""

    folder: Path

    def names(self) -> list[str]:
        """Names in the files, sorted."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def header(self, name: str) -> Header: ...

    def read(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Tensor:
        """The box of ``size`` at ``start`` (default: the whole tensor), in the file's dtype.

        Raises UsageError for an unknown name or a box that exceeds the tensor.
        """
        ...


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """The tensors of a model folder, which may be a pinned checkpoint."""
    if is_pinned(folder):
        yield PinnedSource(folder)
        return
    with TensorSource(folder) as files:
        yield files


class PinnedSource:
    """The tensors of a pinned checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = PinnedTensors(folder)
        self._specs = self._tensors.specs()

    def names(self) -> list[str]:
        return sorted(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def header(self, name: str) -> Header:
        spec = self._spec(name)
        return Header(spec.shape, CODES[spec.dtype])

    def read(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Tensor:
        spec = self._spec(name)
        whole = Box.whole(spec.shape)
        box = Box(start if start is not None else whole.start, size or whole.size)
        values = torch.from_numpy(self._tensors.read(name, box))
        return values.view(torch.bfloat16) if spec.dtype == "bfloat16" else values

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise UsageError(f"{self.folder} has no tensor '{name}' ({len(self._specs)} others)")
        return self._specs[name]


class TensorSource:
    """The tensors in the files of a model folder.

    A context manager; files are opened on first use.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _file_of_each_tensor(folder)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; later reads open them again."""
        self._open.clear()

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def header(self, name: str) -> Header:
        view = self._slice(name)
        return Header(tuple(view.get_shape()), str(view.get_dtype()))

    def read(
        self, name: str, start: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None
    ) -> Tensor:
        view, shape = self._slice(name), self.header(name).shape
        first = start if start is not None else (0,) * len(shape)
        extent = size if size is not None else shape
        if not _fits(first, extent, shape):
            raise UsageError(f"{name} has shape {shape}; a box of {extent} at {first} exceeds it")
        box: Tensor = view[tuple(slice(s, s + n) for s, n in zip(first, extent, strict=True))]
        return box

    def _slice(self, name: str) -> Any:
        name = self._stored_name(name)
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = _opened(self.folder / file)
            return self._open[file].get_slice(name)
        except SafetensorError as error:  # the index does not match the file
            raise CorruptFileError(f"{self.folder / file}: {error}") from error

    def _stored_name(self, name: str) -> str:
        stored = stored_name(name, self._file_of)
        if stored is None:
            raise UsageError(f"{self.folder} has no tensor '{name}' ({len(self._file_of)} others)")
        return stored


class Weights:
    """The parameters of a model folder, by the decoder's names."""

    def __init__(self, files: Tensors, config: ModelConfig, head: Head) -> None:
        """Raises UsageError if the files do not match the config (``mismatches``).

        The value head may be missing.
        """
        self._files = files
        self._shapes = parameter_shapes(config, head)
        self._storage = storage_of(config)
        headers = {name: files.header(name) for name in files.names()}
        if problems := mismatches(headers, config, head):
            raise UsageError(f"{files.folder}: {'; '.join(problems)}")
        if problem := other_projection(files.folder, config, head):
            raise UsageError(f"{files.folder}: {problem}")

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter, in the files' dtype.

        A missing value head is zero, so that a new critic's values start at zero.
        """
        parts = self._storage(name, self._shapes[name])
        if name == VALUE_HEAD and name not in self._files:
            return torch.zeros(box.size)
        if parts[0].row is None:
            return self._part(parts[0], box)
        values = torch.empty(box.size)
        for index, part in enumerate(parts[box.start[0] : box.stop[0]]):
            row = self._part(part, box)
            values = values if index else values.to(row.dtype)
            values[index] = row
        return values

    def read_finite(self, name: str, box: Box) -> Tensor:
        """Read a box like `read`. Raises UsageError if it has NaN or infinite values."""
        values = self.read(name, box)
        if not is_finite(values):
            parts = self._storage(name, self._shapes[name])
            stored = (stored_name(part.tensor, self._files) for part in parts)
            folder = self._files.folder
            problem = not_finite(folder, [found for found in stored if found is not None])
            raise UsageError(problem or f"{folder} has changed while it was read")
        return values

    def _part(self, stored: TensorSlice, box: Box) -> Tensor:
        place = stored.box(box)
        values = self._files.read(stored.tensor, place.start, place.size)
        return values.t() if stored.transposed else values


def from_hf(folder: Path, head: Head = "lm", *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a model folder, on the CPU. One tensor at a time is copied."""
    config = read_config(folder)
    with torch.device("meta"):
        decoder = build(config, head).to(dtype)
    decoder.to_empty(device="cpu")
    with open_tensors(folder) as files, torch.no_grad():
        weights = Weights(files, config, head)
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.read(name, Box.whole(tuple(parameter.shape))))
    return decoder


def to_hf(decoder: Decoder, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a decoder's config and weights into an existing folder.

    The weight files equal those of transformers' ``save_pretrained`` byte for byte. One tensor at a
    time is copied.
    """
    parameters = dict(decoder.named_parameters())
    specs = [
        (name, TensorSpec(tuple(p.shape), str(p.dtype).removeprefix("torch.")))
        for name, p in parameters.items()
    ]

    def read(name: str, box: Box) -> Array:
        return as_array(parameters[name].detach()[box.slices])

    entries = file_entries(specs, read, storage_of(decoder.config))
    write_weights(folder, entries, shard_bytes=shard_bytes)
    values = decoder.config.to_hf(head=decoder.head, dtype=specs[0][1].dtype)
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def is_finite(values: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite values.

    It computes only the min and max, which takes no memory, and less time than reading a file.
    """
    if not values.numel() or not values.is_floating_point() or values.element_size() == 1:
        return True
    least, greatest = torch.aminmax(values)
    return bool(least >= -LARGEST) and bool(greatest <= LARGEST)  # NaN is neither


def as_array(tensor: Tensor) -> Array:
    """A tensor as an array on the host; bfloat16 as its bits in uint16."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = host.numpy()
    return values


def _fits(start: tuple[int, ...], size: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(start) == len(size) == len(shape) and all(
        min(s, n) >= 0 and s + n <= total for s, n, total in zip(start, size, shape, strict=True)
    )


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    files = weight_files(folder)
    if files == {SINGLE_FILE: set()}:
        with _opened(folder / SINGLE_FILE) as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    return {name: file for file, names in files.items() for name in names}


def _opened(path: Path) -> Any:
    inputs.check_file(path)
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise inputs.unreadable(error, path) from error
    except SafetensorError as error:
        raise CorruptFileError(f"{path}: {error}") from error
