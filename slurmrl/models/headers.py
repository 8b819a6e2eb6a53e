"""The headers of a model folder's safetensors files, read without the weights. Torch-free."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from slurmrl.errors import CheckpointError, CorruptFileError, UsageError
from slurmrl.fsio import inputs
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.shapes import LM_HEAD, VALUE_HEAD, parameter_shapes
from slurmrl.models.storage import storage_of
from slurmrl.tensors.checkpoint.pinned import is_pinned
from slurmrl.tensors.checkpoint.stored import file_tensors
from slurmrl.tensors.checkpoint.tensors import CODES
from slurmrl.tensors.layout.layout import TensorSpec

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOATS: Final = ("F64", "F32", "BF16", "F16")
"""The dtypes from which weights are read. Others are quantised, which no engine trains."""
HARMLESS: Final = (LM_HEAD, VALUE_HEAD, "rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
"""Name suffixes of tensors that may be ignored: heads that the role does not use, and constants
that the families compute themselves."""
LFS_POINTER: Final = b"version https://git-lfs"
SHOWN: Final = 5


@dataclass(frozen=True)
class Header:
    """One tensor of a file."""

    shape: tuple[int, ...]
    dtype: str
    """In safetensors' spelling: ``BF16``."""


def weight_files(folder: Path) -> dict[str, set[str]]:
    """Return the files with the weights, and the tensors that the index lists for each: an empty
    set for a model in one file. Raises UsageError."""
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


def read_headers(folder: Path) -> tuple[dict[str, Header], list[str]]:
    """The tensors of a model folder by name, and what is wrong with its files."""
    if is_pinned(folder):
        return _pinned_headers(folder)
    try:
        files = weight_files(folder)
    except UsageError as error:
        return {}, [str(error)]
    headers: dict[str, Header] = {}
    problems = []
    for file, names in files.items():
        try:
            held = _held(folder / file)
        except FileNotFoundError:
            problems.append(f"{folder / file} is missing, but {INDEX_FILE} names it")
            continue
        except UsageError as error:
            problems.append(str(error))
            continue
        except (OSError, SafetensorError) as error:
            problems.append(f"{folder / file} is damaged or truncated: {error}")
            continue
        if absent := sorted(names - held.keys()):
            problems.append(f"{folder / file} lacks {_some(absent)}, which {INDEX_FILE} lists")
        headers |= held
    return headers, problems


def _pinned_headers(folder: Path) -> tuple[dict[str, Header], list[str]]:
    from slurmrl.models.pinned import PinnedTensors  # it compares headers itself

    try:
        specs = PinnedTensors(folder).specs()
    except (UsageError, CheckpointError, CorruptFileError) as error:
        return {}, [str(error)]
    return {name: Header(spec.shape, CODES[spec.dtype]) for name, spec in specs.items()}, []


def mismatches(headers: Mapping[str, Header], config: ModelConfig, head: Head) -> list[str]:
    """How the weights differ from those of the architecture, as messages."""
    missing, other, quantised = [], [], []
    for name, shape in implied_shapes(config, head).items():
        stored = stored_name(name, headers)
        header = None if stored is None else headers[stored]
        if header is None:
            missing += [name] if name != VALUE_HEAD else []
        elif header.shape != shape:
            other.append(f"{name} {list(header.shape)} instead of {list(shape)}")
        elif header.dtype not in FLOATS:
            quantised.append(f"{name} ({header.dtype})")
    messages = []
    if missing:
        messages.append(f"the files lack {_some(missing)}, which config.json implies")
    if other:
        messages.append(f"shapes differ from those that config.json implies: {_some(other)}")
    if quantised:
        messages.append(
            f"{_some(quantised)}: quantised weights are not supported, only {', '.join(FLOATS)}"
        )
    return messages


def stored_name(name: str, names: Container[str]) -> str | None:
    """A tensor's name in the files: models that were saved without a head lack the first part."""
    return next((n for n in (name, name.partition(".")[2]) if n in names), None)


def unused(headers: Mapping[str, Header], config: ModelConfig, head: Head) -> list[str]:
    """Tensors of the files that the architecture does not use."""
    shapes = implied_shapes(config, head)
    known = {*shapes, *(name.partition(".")[2] for name in shapes)}
    return sorted(name for name in headers if name not in known and not name.endswith(HARMLESS))


def implied_shapes(config: ModelConfig, head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the files, by name."""
    specs = [
        (name, TensorSpec(shape, "float32"))
        for name, shape in parameter_shapes(config, head).items()
    ]
    tensors = file_tensors(specs, storage_of(config))
    return {name: tuple(tensor.spec.shape) for name, tensor in tensors.items()}


def _held(path: Path) -> dict[str, Header]:
    """Raises FileNotFoundError, OSError, SafetensorError (also for a truncated file), UsageError
    for what is no file of weights."""
    headers = {}
    with inputs.opened(path) as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UsageError(
                f"{path} is a pointer of Git LFS, not the file: run git lfs pull in its folder"
            )
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            view = file.get_slice(name)
            headers[name] = Header(tuple(view.get_shape()), str(view.get_dtype()))
    return headers


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
