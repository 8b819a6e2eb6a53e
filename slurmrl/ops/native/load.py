"""The compiled operators of a device, or none."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Any

import torch

from slurmrl import env, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.ops.native import build, recipe, toolchain
from slurmrl.ops.native.recipe import Half

SMALL_ELEMENTS = 2**18
"""On a CPU, torch does fewer than these in 10 ms and to the same bits: not worth a build."""


class Choice(StrEnum):
    """Values of SLURMRL_OPS."""

    AUTO = "auto"
    """Compiled where it helps and can be had, else torch."""
    TORCH = "torch"
    """Never compiled."""
    NATIVE = "native"
    """Compiled, or an error that says why not."""


def operators(device: torch.device, elements: int) -> Any | None:
    """The namespace with ``gae``, ``scan`` and ``copy`` for tensors on ``device``; None where
    torch is to do it.

    The first call that needs a half builds it, which can take a minute. Raises
    EnvironmentFailure only under SLURMRL_OPS=native.
    """
    half = {"cpu": Half.CPU, "cuda": Half.CUDA}.get(device.type)
    choice = _choice()
    if half is None or choice is Choice.TORCH:
        return None
    if choice is Choice.NATIVE:
        return load(half)
    if half is Half.CPU and elements < SMALL_ELEMENTS:
        return None
    return _load_or_warn(half)


@cache
def load(half: Half) -> Any:
    """Build the half where it is not in the cache, and load it into this process.

    Raises EnvironmentFailure.
    """
    found = recipe.make(half, toolchain.find())
    path = build.library(found, build.cache_folder(), build.host_folder())
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise EnvironmentFailure(f"{path} does not load: {error}") from error
    return getattr(torch.ops, found.name)


@cache
def _load_or_warn(half: Half) -> Any | None:
    try:
        return load(half)
    except EnvironmentFailure as error:
        log.get(__name__).warning(
            "The operators of slurmrl run in pure torch on this host's %s devices, which is slower "
            "(to build the fast ones: python -m slurmrl.ops.native): %s",
            half,
            error,
        )
        return None


def _choice() -> Choice:
    return Choice(env.OPS.get())
