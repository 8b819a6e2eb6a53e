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

HALVES = {"cpu": Half.CPU, "cuda": Half.CUDA}
"""By type of device."""


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
    choice = _choice()
    if device.type not in HALVES or choice is Choice.TORCH:
        return None
    if choice is Choice.NATIVE:
        return _ready(device)
    if device.type == "cpu" and elements < SMALL_ELEMENTS:
        return None
    return _ready_or_warn(device)


@cache
def load(half: Half) -> Any:
    """Load a half into this process, built where the cache does not hold it.

    A host whose compilers are missing or fail takes a library that others made from the same
    sources. Raises EnvironmentFailure where there is none.
    """
    folder = build.cache_folder()
    try:
        found = recipe.make(half, toolchain.find())
        paths = [build.library(found, folder, build.host_folder())]
    except EnvironmentFailure:
        paths = build.ready_made(half, folder)
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
    """The operators of a device that can run them. Raises EnvironmentFailure."""
    found = load(HALVES[device.type])
    if device.type == "cuda":
        try:
            with torch.cuda.device(device):
                found.probe()
        except RuntimeError as error:
            raise EnvironmentFailure(f"{device}: {error}") from error
    return found


@cache
def _ready_or_warn(device: torch.device) -> Any | None:
    try:
        return _ready(device)
    except EnvironmentFailure as error:
        log.get(__name__).warning(
            "The operators of slurmrl run in pure torch on %s of this host, which is slower (to "
            "build the fast ones, here or on another host that shares the cache: "
            "python -m slurmrl.ops.native): %s",
            device,
            error,
        )
        return None


def _choice() -> Choice:
    return Choice(env.OPS.get())
