"""The engines that an allocation string may name, and the dimensions that each takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AXIS_OF: Final = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
"""Axis behind each letter, in the order in which a string writes them."""


@dataclass(frozen=True)
class Backend:
    name: str
    dimensions: str
    """The letters that it takes."""


BACKENDS: Final = {
    backend.name: backend
    for backend in (
        Backend("fsdp", "dtc"),
        Backend("archon", "dtpce"),
        Backend("megatron", "dtpce"),
        Backend("native", "dt"),
        Backend("sglang", "dtp"),
        Backend("vllm", "dtp"),
    )
}
