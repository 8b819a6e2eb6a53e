"""Low-rank adapters (Hu et al. 2021). Torch-free.

This module returns the names and shapes of adapters, adds adapters to frozen weights, and writes
PEFT's files. It also computes the fingerprint of the weights for which adapters were trained.

The weight ``<module>.weight`` [o, i] has the matrices ``<module>.lora_A`` [r, i] and
``<module>.lora_B`` [o, r]: o outputs, i inputs, r rank of the adapter. The sum has the same bits
wherever it is computed.

The fingerprint is a sum over all elements of a model, modulo 2^64. Each element adds its bits times
an odd random number, a function of the parameter's name and the element's place. The sum therefore
does not depend on how and in which order the weights are added. If an element, its place or its
type changes, the sum changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slurmrl.config.schema.roles import ALL_LINEAR, TARGETS, Lora
from slurmrl.errors import UsageError
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf_config import MODULE
from slurmrl.models.hf_targets import TRANSPOSED, peft_targets
from slurmrl.models.shapes import VALUE_HEAD, Shapes, parameter_shapes
from slurmrl.tensors.checkpoint.export import (
    AS_STORED,
    Precision,
    TokenizerFiles,
    write_folder,
    write_json,
)
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import TensorEntry, write_tensors
from slurmrl.tensors.layout import Array, Box, Index, TensorSpec, blocks, row_major
from slurmrl.tensors.ops.splitmix import Bits, hash64, mix

if TYPE_CHECKING:
    from torch import Tensor


LORA_A = "lora_A"
LORA_B = "lora_B"
MATRICES = (LORA_A, LORA_B)
OWN_FILES = "slurmrl.models.shapes:gpt2"
Matrix = TypeVar("Matrix", Array, "Tensor")
BLOCK = 2**18
"""Number of elements that fit into the cache of a core while all products are added."""
SUMMED = 2**16
"""Number of elements that a step of the fingerprint sums: as many as a core's cache holds."""
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of the wrapped model."""
TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "value": "SEQ_CLS"}


def matrix_name(weight: str, matrix: str) -> str:
    """Return the name of a weight's adapter matrix."""
    return f"{weight.removesuffix('.weight')}.{matrix}"


def adapted_weight(name: str) -> str | None:
    """Return the weight to which an adapter matrix belongs; None for any other parameter."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in MATRICES else None


def adapted_weights(config: ModelConfig, lora: Lora) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and shape of each weight that has an adapter, in the decoder's order."""
    for name, shape in parameter_shapes(config, "lm").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 2 and lora.adapts(module.rpartition(".")[2]):
            yield name, (shape[0], shape[1])


def trained_shapes(config: ModelConfig, head: Head, lora: Lora) -> Shapes:
    """Return the shapes of all trained tensors: the adapters, and a value model's head."""
    shapes: Shapes = {}
    for name, (outputs, inputs) in adapted_weights(config, lora):
        shapes[matrix_name(name, LORA_A)] = (lora.rank, inputs)
        shapes[matrix_name(name, LORA_B)] = (outputs, lora.rank)
    if head == "value":
        shapes[VALUE_HEAD] = parameter_shapes(config, head)[VALUE_HEAD]
    return shapes


def refusal(config: ModelConfig, lora: Lora) -> str | None:
    """Return why a model cannot have these adapters; None if it can."""
    if config.family.files == OWN_FILES:
        return (
            f"{config.model_type} stores queries, keys and values as one matrix, so PEFT's format "
            "has no separate adapters for them; leave out lora, or use another family"
        )
    modules = {name.split(".")[-2] for name in parameter_shapes(config, "lm")}
    able = [name for name in TARGETS if name in modules]
    listed = ", ".join(able)
    if lora.targets is None or lora.targets == ALL_LINEAR:
        if config.moe is None:
            return None
        return f"'{ALL_LINEAR}' includes the experts, which have no adapters; list some of {listed}"
    missing = [name for name in lora.targets if name not in able]
    if missing:
        return f"this {config.model_type} model has no linear layer '{missing[0]}'; it has {listed}"
    return None


def merge(
    out: Matrix, weight: Matrix, b: Matrix, a: Matrix, scale: float, *, block: int = BLOCK
) -> None:
    """Write weight + scale * b a into ``out`` [o, i].

    The sum is computed in float32, then rounded to the type of ``out``. ``weight`` [o, i] is of
    float32 or a narrower type; ``b`` [o, r] and ``a`` [r, i] are float32. All four are NumPy
    arrays, or tensors on one device.

    A matrix product may add its terms in an order that depends on the numbers of rows and columns,
    the processor and the library. This function rounds each product and each sum of two elements by
    itself, and adds the terms in the order of r. The bits of an element therefore depend neither on
    the given rows and columns nor on ``block``, the number of elements merged at a time.
    """
    rows, columns = out.shape
    each = max(1, block // max(1, columns))
    for first in range(0, rows, each):
        part = slice(first, first + each)
        delta = b[part, :1] * a[:1]
        for term in range(1, a.shape[0]):
            delta += b[part, term : term + 1] * a[term : term + 1]
        delta *= scale
        delta += weight[part]
        out[part] = delta


def write_adapter(
    trained: RoleCheckpoint,
    target: Path,
    lora: Lora,
    head: Head,
    *,
    base: str,
    theirs: Mapping[str, Any] | None = None,
    tokenizer: TokenizerFiles | None = None,
    precision: Precision = AS_STORED,
    calls: SystemCalls = REAL,
) -> Path:
    """Write the adapters of a checkpoint as a folder that PEFT loads onto the model ``base``.

    ``theirs`` is the ``config.json`` object of a model of transformers; None for the built-in
    decoder. The folder is complete or absent; an existing folder is replaced.
    """
    turned = theirs is not None and theirs["model_type"] in TRANSPOSED
    entries = [
        precision.apply(_entry(trained, name, spec, turned=turned and name.endswith(MATRICES)))
        for name, spec in trained.weights()
    ]
    layers = [
        name.removesuffix(f".{LORA_A}") for name, _ in trained.weights() if name.endswith(LORA_A)
    ]
    values = {**_config(lora, head, base), "fan_in_fan_out": turned}
    if theirs is None:
        names = {layer.rpartition(".")[2] for layer in layers}
        values["target_modules"] = [name for name in TARGETS if name in names]
    else:
        values["target_modules"], wrapped = peft_targets(theirs, lora, layers)
        if wrapped:  # PEFT has no dropout for parameters, and an export is for inference.
            values |= {"target_parameters": wrapped, "lora_dropout": 0.0}

    def fill(folder: Path) -> None:
        write_tensors(folder / "adapter_model.safetensors", entries, {"format": "pt"}, calls=calls)
        write_json(folder / "adapter_config.json", values, calls)
        if tokenizer is not None:
            tokenizer.copy(folder, calls)

    return write_folder(target, fill, calls)


def _entry(trained: RoleCheckpoint, name: str, spec: TensorSpec, *, turned: bool) -> TensorEntry:
    """Return a trained tensor as PEFT stores it. Transpose matrices of weights in ``turned``."""
    short = name.removeprefix(MODULE)
    theirs = f"{PREFIX}{short}.weight" if name.endswith(MATRICES) else PREFIX + short
    if not turned:
        return TensorEntry(theirs, spec, partial(trained.read, name))
    layer, _, matrix = short.rpartition(".")
    other = LORA_A if matrix == LORA_B else LORA_B
    shape = spec.shape[::-1]
    return TensorEntry(
        f"{PREFIX}{layer}.{other}.weight",
        TensorSpec(shape, spec.dtype),
        lambda: np.ascontiguousarray(trained.read(name).T),
    )


def _config(lora: Lora, head: Head, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": TASKS[head],
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "modules_to_save": ["score"] if head == "value" else None,
        "bias": "none",
        "inference_mode": True,
    }


def summand(
    name: str, shape: Index, box: Box, bits: Bits, count: Callable[[int, int], Bits]
) -> Bits:
    """Return the contribution of a box of a parameter of ``shape`` to the fingerprint.

    ``bits`` has the elements of the box, flat, as integers of their width. ``count`` returns a
    range of integers as int64, on the device of ``bits``.
    """
    places = count(0, 1)
    for stride, start, size in zip(row_major(shape), box.start, box.size, strict=True):
        places = places[..., None] + count(start, start + size) * stride
    factors = mix(places.reshape(-1) ^ hash64(name)) | 1
    added: Bits = (factors * bits).sum()
    return added


def tensor_sum(name: str, shape: Index, read: Callable[[Box], Array]) -> int:
    """Return a tensor's contribution to the fingerprint; ``read`` returns the tensor's boxes."""
    total = 0
    for box in blocks(Box.whole(shape), SUMMED):
        values = np.ascontiguousarray(read(box)).reshape(-1)
        bits = values.view(f"{'i' if values.itemsize > 1 else 'u'}{values.itemsize}")
        total += int(summand(name, shape, box, bits, np.arange))
    return total


def check_unchanged(folder: Path, fingerprint: str, found: str) -> None:
    """Raise UsageError if the fingerprint of a folder's weights differs from training."""
    if found != fingerprint:
        raise UsageError(
            f"the weights in {folder} have changed since the adapters were trained: their "
            f"fingerprint was {fingerprint} and is {found}. Restore the folder"
        )


def shown(total: int) -> str:
    """Return the string that checkpoints and weight versions store for a fingerprint."""
    return f"{total % 2**64:016x}"
