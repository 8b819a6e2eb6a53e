"""The engine's entry, which says how to install what is missing."""

from __future__ import annotations

from typing import Any

from slurmrl.engines.base import Engine
from slurmrl.engines.megatron.core import require


def make(*args: Any, **kwargs: Any) -> Engine:
    """A ``MegatronEngine``. Raises UsageError where megatron-core is not installed."""
    require()
    from slurmrl.engines.megatron.engine import MegatronEngine

    return MegatronEngine(*args, **kwargs)
