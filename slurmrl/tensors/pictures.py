"""The prepared pictures of prompts: safetensors files named after their content. Torch-free.

A file has the pictures of one sequence as a model needs them: the arguments of its ``forward``
(``pixel_values``, and for some families the grid of each picture), and the number of placeholder
tokens that the pictures replace. Batches, requests and messages have only the path of the file. A
sequence without pictures has an empty path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls, corrupt, discard
from slurmrl.tensors.layout import Array

NONE: Final = ""
"""Path of a sequence without pictures."""
METADATA: Final = "pictures"
"""Key in a batch's metadata for the path of each item's pictures, or `NONE`."""
COUNT: Final = "placeholder_tokens"
"""Name in files of the number of tokens that the pictures replace."""
KEY_BYTES: Final = 16
LARGEST_BYTES: Final = 2**34
"""Maximum size of a file."""
REMEDY: Final = "the next incarnation prepares the data again"
FOLDER, MANIFEST = "pictures", "manifest.json"
"""Names in a directory of prepared data: the folder of these files, and the manifest, without which
the directory is not used."""


@dataclass(frozen=True)
class PictureInputs:
    """The pictures of one sequence as arguments of a model."""

    tokens: int
    """Number of placeholder tokens of images."""
    arguments: Mapping[str, Array]
    """Mapping from an argument of the model's ``forward`` to its array. A batch joins the arrays of
    several sequences along dim 0."""
    videos: int = 0
    """Number of placeholder tokens of videos."""

    @property
    def arrays(self) -> dict[str, Array]:
        """Mapping from names to all arrays of the file."""
        counts = [self.tokens, self.videos] if self.videos else [self.tokens]
        return {**self.arguments, COUNT: np.array(counts, np.int64)}


def key_of(arrays: Mapping[str, Array]) -> bytes:
    """Return the content key of arrays, which has `KEY_BYTES` bytes."""
    digest = blake2b(digest_size=KEY_BYTES)
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {values.dtype.str} {values.shape} ".encode())
        digest.update(values.tobytes())
    return digest.digest()


def path_of(directory: Path, key: bytes) -> Path:
    """Return the file of a content key in a directory of prepared data."""
    name = key.hex()
    return directory / FOLDER / name[:2] / f"{name}.safetensors"


def write(directory: Path, pictures: PictureInputs, *, calls: SystemCalls = REAL) -> bytes:
    """Write pictures durably unless the directory has them; return their content key.

    Raises EnvironmentFailure.
    """
    key = key_of(pictures.arrays)
    path = path_of(directory, key)
    if not os.path.lexists(path):
        atomic.make_private_directory(path.parent, calls=calls)
        atomic.replace(path, save(pictures.arrays), calls=calls)
    return key


def read(path: Path, *, calls: SystemCalls = REAL) -> PictureInputs:
    """Return the pictures in a file of `write`, after comparing the content with the name.

    Raises EnvironmentFailure if the file cannot be read. If the file is missing or damaged, remove
    the manifest of the directory and raise CorruptFileError.
    """
    arrays: dict[str, Array] = {}
    problem = "is damaged"
    try:
        arrays = load(atomic.read(path, calls=calls, limit_bytes=LARGEST_BYTES))
    except FileNotFoundError:
        problem = "is missing"
    except (ValueError, SafetensorError):
        pass
    if COUNT not in arrays or key_of(arrays).hex() != path.stem:
        discard(path.parents[2] / MANIFEST, calls)
        raise corrupt(path, problem, REMEDY)
    tokens, *videos = arrays.pop(COUNT).tolist()
    return PictureInputs(tokens, arrays, sum(videos))
