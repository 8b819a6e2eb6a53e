"""Which engines the plan takes. A new engine is a file under ``slurmrl/engines`` and one line here.

The allocation grammar knows more backends than there are engines: what is not in this table parses
and is then refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from slurmrl.allocation import Allocation
from slurmrl.allocation.backends import AXIS_OF
from slurmrl.errors import AllocationError


@dataclass(frozen=True)
class EngineRules:
    """What an engine takes: the dimensions of its layout, and ``module:Class`` of the torch-free
    class whose ``from_hf`` refuses architectures that it cannot run."""

    dimensions: str
    architectures: str
    hf_architectures: str | None = None
    """The same for ``implementation: hf``; None where the engine does not have it."""


ENGINES: Final = {
    "fsdp": EngineRules(
        "d",
        "slurmrl.models.config:ModelConfig",
        hf_architectures="slurmrl.models.hf_config:HFConfig",
    )
}


def rules_of(allocation: Allocation) -> EngineRules:
    """The rules of an allocation's engine. Raises AllocationError for a backend or a dimension
    without an engine."""
    rules = ENGINES.get(allocation.backend)
    if rules is None:
        raise AllocationError(
            f"'{allocation}': there is no engine for {allocation.backend} in this version; "
            f"allowed: {', '.join(ENGINES)}"
        )
    for letter, axis in AXIS_OF.items():
        if allocation.sizes[axis] > 1 and letter not in rules.dimensions:
            raise AllocationError(
                f"'{allocation}': the {allocation.backend} engine of this version does not split "
                f"'{letter}'; allowed: {', '.join(rules.dimensions)}"
            )
    return rules
