"""Loading of the compiled operators for a device."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slurmrl import env, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.tensors.ops.native import libraries
from slurmrl.tensors.ops.native.libraries import Half

SMALL_ELEMENTS = 2**18
"""Number of elements below which no operators are built. For fewer elements, torch takes under 10
ms on a CPU and returns the same bits."""

BUILT = SMALL_ELEMENTS
"""Value to pass as ``elements`` if operators must be compiled for any size, because a token's
result must not depend on the number of tokens."""

HALVES = {"cpu": Half.CPU, "cuda": Half.CUDA}
"""Half of the operators for each device type."""


class Choice(StrEnum):
    """Values of SLURMRL_OPS."""

    AUTO = "auto"
    """Use compiled operators if they are available and faster than torch, else torch."""
    TORCH = "torch"
    """Use only torch."""
    NATIVE = "native"
    """Use only compiled operators; raise an error if they are not available."""


def operators(device: torch.device, elements: int) -> Any | None:
    """Return the namespace with ``gae``, ``scan`` and ``copy`` for tensors on ``device``.

    Return None to use torch instead. The first call that needs a half builds it, which can take a
    minute. Raises EnvironmentFailure only with SLURMRL_OPS=native.
    """
    choice = _choice()
    if device.type not in HALVES or choice is Choice.TORCH:
        return None
    if choice is Choice.NATIVE:
        return _ready(device)
    if device.type == "cpu" and elements < SMALL_ELEMENTS:
        return None
    return _ready_or_warn(device)


def for_floats(like: Tensor) -> Any:
    """Return the operators that exist only for float32 on CPUs.

    Return None if ``like`` has a different dtype or device, or if the operators are not available.
    """
    if like.dtype != torch.float32 or like.device.type != "cpu":
        return None
    return operators(like.device, BUILT)


def chosen(failure: Callable[[], str], what: str) -> bool:
    """Return whether to use Triton kernels, according to SLURMRL_OPS.

    ``failure`` tries the kernels and returns why they cannot be used, or "". ``what`` is their name
    in messages. Raises EnvironmentFailure with SLURMRL_OPS=native if the kernels cannot be used.
    """
    choice = Choice(env.OPS.get())
    if choice is Choice.TORCH:
        return False
    reason = failure()
    if reason and choice is Choice.NATIVE:
        raise EnvironmentFailure(f"{what} cannot be used: {reason}")
    return not reason


@cache
def load(half: Half) -> Any:
    """Load a half into this process and return its operators. Build the half if the cache lacks it.

    If compilers are missing or fail, use a cached library that another host built from the same
    sources. Raises EnvironmentFailure if there is none.
    """
    folder = libraries.cache_folder()
    try:
        wanted = libraries.make(half, libraries.find_toolchain())
        paths = [libraries.library(wanted, folder, libraries.host_folder())]
    except EnvironmentFailure:
        paths = libraries.ready_made(half, folder)
        if not paths:
            raise
    reasons = []
    for path in paths:
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:
            reasons.append(f"{path} does not load: {error}")
        else:
            return getattr(torch.ops, f"slurmrl_{half}")
    raise EnvironmentFailure("; ".join(reasons))


@cache
def _ready(device: torch.device) -> Any:
    """Return the operators after a test on the device. Raises EnvironmentFailure."""
    operators = load(HALVES[device.type])
    if device.type == "cuda":
        try:
            with torch.cuda.device(device):
                operators.probe()
        except RuntimeError as error:
            raise EnvironmentFailure(f"{device}: {error}") from error
    return operators


@cache
def _ready_or_warn(device: torch.device) -> Any | None:
    try:
        return _ready(device)
    except EnvironmentFailure as error:
        log.get(__name__).warning(
            "The operators of slurmrl run in pure torch on %s of this host, which is slower. To "
            "build the compiled operators, run python -m slurmrl.tensors.ops.native on this host "
            "or on another host that shares the cache. Reason: %s",
            device,
            error,
        )
        return None


def _choice() -> Choice:
    return _parsed(os.environ.get(env.OPS.name, ""))


@cache
def _parsed(text: str) -> Choice:
    return Choice(env.OPS.get({env.OPS.name: text}))
