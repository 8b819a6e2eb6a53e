"""Fused elementwise operators: each is one pass over its tensors, by a Triton kernel.

torch makes several passes over tensors such as [tokens, vocabulary], which together cost as much as
a matrix product. Callers compute in pure torch if ``fits`` is false.

Shapes: t rows, V columns, T tokens, i inner units, H heads, D head size.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slurmrl import env, log
from slurmrl.tensors.ops.native.loading import chosen

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Mapping from an activation's name in config.json to its name in kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_BLOCK = 4096
"""Number of columns of a row that a program processes at a time."""
BLOCK = 1024
"""Number of elements that a program processes."""


def fits(x: Tensor) -> bool:
    """Return whether the operators support x's dtype and device, and x is not empty.

    Raises EnvironmentFailure with SLURMRL_OPS=native if the kernels do not run on x's GPU.
    """
    if x.dtype not in DTYPES or not x.numel() or not (x.is_cuda or env.TRITON_INTERPRET.get()):
        return False
    return chosen(lambda: _failure(x.device), f"Triton kernels on {x.device}")


@cache
def _failure(device: torch.device) -> str:
    """Return why the kernels do not run on the device; "" if they run. Log a warning once."""
    try:
        probe = torch.zeros((1, 1, 2), device=device)
        _rotate(probe, probe, probe, 1.0)
    except Exception as error:  # noqa: BLE001 - Triton, compilers and drivers raise any type
        reason = f"{type(error).__name__}: {error}"
        log.get(__name__).warning(
            "Elementwise operators run in pure torch on %s, which is slower: Triton, which needs a "
            "C compiler and Python's headers, does not work here: %s",
            device,
            reason,
        )
        return reason
    return ""


def softmax_statistics(
    logits: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalizer, entropy and log p(target) of softmax(scale * logits), each [t] float32.

    logits [t, V] float32, targets [t] int64.
    """
    results: tuple[Tensor, Tensor, Tensor] = _softmax_statistics(logits, targets, scale)
    return results


@torch.library.custom_op("slurmrl::softmax_statistics", mutates_args=())
def _softmax_statistics(
    logits: Tensor, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = logits.shape
    results = [logits.new_empty(rows) for _ in range(3)]
    kernels().softmax_statistics[(rows,)](
        logits.contiguous(), targets.contiguous(), *results, columns, scale, ROW_BLOCK, num_warps=8
    )
    return results[0], results[1], results[2]


def logit_gradient(
    logits: Tensor, per_row: tuple[Tensor, ...], scale: float, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of logits [t, V] from log-probabilities and entropies, in ``dtype``.

    ``per_row`` has targets, normalizers, entropies, and the gradients of log p(target) and of the
    entropy, each [t]. A target out of range adds nothing.
    """
    gradient: Tensor = _logit_gradient(logits, list(per_row), scale, dtype)
    return gradient


@torch.library.custom_op("slurmrl::logit_gradient", mutates_args=())
def _logit_gradient(
    logits: Tensor, per_row: list[Tensor], scale: float, dtype: torch.dtype
) -> Tensor:
    rows, columns = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    grid = (rows, -(-columns // ROW_BLOCK))
    inputs = [x.contiguous() for x in per_row]
    kernels().logit_gradient[grid](
        logits.contiguous(), gradient, *inputs, columns, scale, ROW_BLOCK, num_warps=8
    )
    return gradient


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, all [T, i]."""
    product: Tensor = _gated_product(gate, up, ACTIVATIONS[activation])
    return product


@torch.library.custom_op("slurmrl::gated_product", mutates_args=())
def _gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    gate, up = alike(gate, up)
    rows, columns = gate.shape
    product = gate.new_empty(rows, columns)
    kernels().gated_product[(rows * -(-columns // BLOCK),)](
        gate, up, product, columns, gate.stride(0), activation, BLOCK
    )
    return product


def gated_gradient(
    gate: Tensor, up: Tensor, grad: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return activation(gate) * up [T, i], and the gradients of gate and up [T, 2i] side by side.

    ``grad`` [T, i] is the gradient of the product.
    """
    results: tuple[Tensor, Tensor] = _gated_gradient(gate, up, grad, ACTIVATIONS[activation])
    return results


@torch.library.custom_op("slurmrl::gated_gradient", mutates_args=())
def _gated_gradient(
    gate: Tensor, up: Tensor, grad: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    gate, up = alike(gate, up)
    rows, columns = gate.shape
    product, gradients = gate.new_empty(rows, columns), gate.new_empty(rows, 2 * columns)
    inputs = (gate, up, grad.contiguous(), product, gradients)
    kernels().gated_gradient[(rows * -(-columns // BLOCK),)](
        *inputs, columns, gate.stride(0), activation, BLOCK
    )
    return product, gradients


def alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up with contiguous rows at equal strides. Do not copy halves of a tensor."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        return gate.contiguous(), up.contiguous()
    return gate, up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Return `elementwise.rotate` of x [T, H, D]; a ``sign`` of -1 rotates back.

    cos and sin are [T, 1, D].
    """
    out: Tensor = _rotate(x, cos, sin, sign)
    return out


@torch.library.custom_op("slurmrl::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    tokens, heads, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (tokens, -(-heads * size // BLOCK))
    inputs = [t.contiguous() for t in (x, cos, sin)]
    kernels().rotation[grid](*inputs, out, heads * size, size, sign, BLOCK)
    return out


def kernels() -> Any:
    """Return the module of the kernels, which imports Triton."""
    return importlib.import_module("slurmrl.tensors.ops.triton_kernels")
