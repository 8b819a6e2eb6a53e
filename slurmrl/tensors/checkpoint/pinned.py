"""A checkpoint that another trial reads: a model folder whose weights are hard links to the ranks'
files of one role. Torch-free.

The folder takes no space while the checkpoint is kept, and keeps the files once their own trial has
deleted it. Besides the files of a model folder, it has a manifest like a checkpoint's and
``origin.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from slurmrl.errors import CheckpointError
from slurmrl.fsio import documents, objects
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.primitives import write_new
from slurmrl.fsio.shapes import INTEGER, SIZE, one_of
from slurmrl.tensors.checkpoint.manifest import Manifest, read_manifest, write_listing

ORIGIN: Final = "origin.json"
VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class PinnedOrigin:
    """What the linked files are."""

    version: Annotated[int, INTEGER]
    trial: str
    step: Annotated[int, SIZE]
    role: str
    implementation: Annotated[str, one_of("builtin", "hf")]
    head: Annotated[str, one_of("lm", "value")]
    base: str | None = None
    """The model folder that the adapters belong to."""
    lora: Mapping[str, Any] | None = None
    """Of a role that trains adapters: its settings."""
    dtype: str | None = None
    """Of the weights that the adapters were trained on; None in older folders."""


def is_pinned(folder: Path) -> bool:
    return (folder / ORIGIN).is_file()


def read_origin(folder: Path) -> PinnedOrigin:
    """Raises CheckpointError, CorruptFileError, EnvironmentFailure."""
    path = folder / ORIGIN
    values = documents.read(path, {"version": INTEGER}, ("version",))
    if values["version"] != VERSION:
        message = f"{path} has version {values['version']}; this program reads version {VERSION}"
        raise CheckpointError(message)
    return objects.from_json(PinnedOrigin, values, path)


def pin(checkpoint: Path, origin: PinnedOrigin, folder: Path, calls: SystemCalls = REAL) -> None:
    """Add the links, the manifest and the origin to a folder, durably. Raises
    DamagedCheckpointError, EnvironmentFailure, OSError."""
    manifest = read_manifest(checkpoint)
    files = tuple(file for file in manifest.files if file.name.startswith(f"{origin.role}."))
    for file in files:
        calls.link(checkpoint / file.name, folder / file.name)
    write_listing(folder, Manifest(manifest.step, files), calls=calls)
    text = json.dumps(objects.to_json(origin), indent=1) + "\n"
    write_new(folder / ORIGIN, text.encode(), True, calls)
