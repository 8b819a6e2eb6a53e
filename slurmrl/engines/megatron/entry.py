"""The registry's entry point: checks for megatron-core before it imports the engine."""

from __future__ import annotations

from typing import Any

from slurmrl.engines.base import Engine
from slurmrl.engines.megatron.core import require


def make(*args: Any, **kwargs: Any) -> Engine:
    """A ``MegatronEngine``. Raises UsageError if megatron-core is not installed or has no GPU."""
    require()
    from slurmrl.engines.megatron.engine import MegatronEngine

    return MegatronEngine(*args, **kwargs)
