"""megatron-core itself: whether it is there, and what of it is used."""

from __future__ import annotations

import importlib
import importlib.util

from slurmrl.engines.megatron.schema import INSTALL_HINT
from slurmrl.errors import UsageError


def require() -> None:
    """Make megatron-core ready. Raises UsageError where it is missing, with the command that
    installs it, and where it has no GPU."""
    if _missing("megatron.core"):
        raise UsageError(f"the megatron engine needs megatron-core: {INSTALL_HINT}")
    # TransformerEngine's product for routers: 0.16.1 reads the name without it, too, and would take
    # it wherever it is, with products of TF32 where float32 is asked for.
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(utils)["te_general_gemm"] = None
    # Scratch memory that sequence parallelism gathers into: the only thing of megatron's global
    # state that is set here, and it knows no layout.
    state = importlib.import_module("megatron.core.parallel_state")
    try:
        vars(state)["torch"].cuda.current_device()  # as megatron sees it
    except (AssertionError, RuntimeError) as error:
        raise UsageError(
            f"the megatron engine needs a GPU ({error}); fsdp computes on CPUs, too"
        ) from error
    if vars(state)["_GLOBAL_MEMORY_BUFFER"] is None:
        vars(state)["_set_global_memory_buffer"]()


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
