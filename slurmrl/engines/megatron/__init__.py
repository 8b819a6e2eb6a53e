"""The megatron engine: megatron-core's models, schedules and distributed optimizer.

The engine supports tensor, sequence, pipeline, context and expert parallelism. ``parts`` and this
module are torch-free: `make` checks for megatron-core and sets up its global state before it
imports the engine.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from slurmrl.errors import UsageError
from slurmrl.plan.engine_rules import ENGINES

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


def make(*args: Any, **kwargs: Any) -> TrainEngine:
    """Return a ``MegatronEngine``. Raises UsageError without megatron-core or a GPU."""
    require()
    from slurmrl.engines.megatron.engine import MegatronEngine

    return MegatronEngine(*args, **kwargs)


def require() -> None:
    """Prepare megatron-core.

    Raises UsageError without megatron-core (with the command that installs it) or a GPU.
    """
    if _missing("megatron.core"):
        install = ENGINES["megatron"].install
        raise UsageError(f"the megatron engine needs megatron-core: {install}")
    # With TransformerEngine's matrix product, routers would compute in TF32, even in float32
    # models. megatron-core 0.16.1 reads this name even without TransformerEngine.
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    vars(utils)["te_general_gemm"] = None
    # Gathers of sequence parallelism need this scratch memory. slurmrl sets no other global state
    # of megatron. The memory does not depend on the layout.
    state = importlib.import_module("megatron.core.parallel_state")
    try:
        vars(state)["torch"].cuda.current_device()  # CPU tests replace this `torch`.
    except (AssertionError, RuntimeError) as error:
        raise UsageError(
            f"the megatron engine needs a GPU ({error}); on CPUs use the fsdp backend"
        ) from error
    if vars(state)["_GLOBAL_MEMORY_BUFFER"] is None:
        vars(state)["_set_global_memory_buffer"]()


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True
