"""Weights with FP8 matrices for servers, made from the files of a weight version.

Each block of 128 x 128 elements has a factor. The block's elements are divided by the factor, so
that the largest element becomes the largest float8_e4m3fn number. Servers multiply by the factors.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio.calls import REAL, explain
from slurmrl.models.hf import CONFIG_FILE, as_tensor, read_values
from slurmrl.models.model_tensors import SafetensorsFolder
from slurmrl.plan.estimates.server_types import (
    BLOCK,
    FACTORS,
    FP8_CAPABILITY,
    LARGEST,
    MATRICES,
    fp8_config,
)
from slurmrl.tensors.checkpoint.export import write_index, write_json
from slurmrl.tensors.layout import Box

AT_A_TIME: Final = 2**24
"""Maximum number of elements that are converted at a time. A server uses most of the GPU memory."""
LEAST: Final = 1e-12
"""Minimum magnitude for the factor of a block, so that a block of zeros has no factor 0."""


def require_fp8(key: str, device: torch.device) -> None:
    """Raise UsageError for a GPU that cannot multiply FP8 matrices. The message names ``key``."""
    if device.type != "cuda":
        return
    if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise UsageError(
            f"{key} needs GPUs of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or "
            f"higher; {torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}"
        )


@contextmanager
def fp8_folder(folder: Path, device: torch.device) -> Iterator[Path]:
    """Yield a temporary folder with the same model, but with matrices in FP8.

    ``device`` computes the matrices. The tensors of the file being written are in host memory.
    Raises UsageError or CorruptFileError for unreadable weights, EnvironmentFailure.
    """
    try:
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".fp8."))
    except OSError as error:
        raise explain(error, "make a folder for FP8 weights in", folder.parent) from error
    try:
        _write(folder, made, device)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(folder: Path, made: Path, device: torch.device) -> None:
    source = SafetensorsFolder(folder)
    specs = source.specs()
    files: dict[str, list[str]] = {}
    for name in specs:
        files.setdefault(source.file(name).name, []).append(name)
    places: dict[str, str] = {}
    size = 0
    for file, names in files.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            spec = specs[name]
            values = as_tensor(source.read(name, Box.whole(spec.shape)), spec.dtype)
            if not name.endswith(MATRICES):
                tensors[name] = values.clone()
                continue
            if len(spec.shape) != 2:
                raise UsageError(f"{folder}: {name} has the shape {list(spec.shape)}, not a matrix")
            tensors[name], tensors[name + FACTORS] = quantize(values, device)
        try:
            save_file(tensors, made / file, metadata={"format": "pt"})
        except OSError as error:
            raise explain(error, "write", made / file) from error
        except SafetensorError as error:
            raise EnvironmentFailure(f"cannot write {made / file}: {error}") from error
        places |= dict.fromkeys(tensors, file)
        size += sum(each.nbytes for each in tensors.values())
    if len(files) > 1:
        write_index(made, places, size, REAL)
    write_json(made / CONFIG_FILE, fp8_config(read_values(folder)), REAL)


def quantize(matrix: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an FP8 matrix [m, n] and the factors of its blocks in float32, in host memory.

    The factors have the shape [ceil(m / 128), ceil(n / 128)]. Blocks at the end may be smaller.
    """
    step = max(AT_A_TIME // (matrix.shape[1] * BLOCK), 1) * BLOCK
    found = [_blocks(rows.to(device)) for rows in torch.split(matrix, step)]
    values, factors = ([part.cpu() for part in parts] for parts in zip(*found, strict=True))
    return torch.cat(values), torch.cat(factors)


def _blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    padding = (0, columns * BLOCK - matrix.shape[1], 0, rows * BLOCK - matrix.shape[0])
    filled = torch.nn.functional.pad(matrix.float(), padding)
    blocks = filled.view(rows, BLOCK, columns, BLOCK)
    factors = blocks.abs().amax((1, 3)).clamp(min=LEAST) / LARGEST
    scaled = (blocks / factors[:, None, :, None]).view(filled.shape)
    return scaled[: matrix.shape[0], : matrix.shape[1]].to(torch.float8_e4m3fn), factors
