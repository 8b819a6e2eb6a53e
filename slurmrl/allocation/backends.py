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
    trains: bool = True
    """Whether it trains; the others only generate."""
    halves: bool = False
    """Whether attention and experts may lie differently: ``(attn:…|ffn:…)``."""
    serves: bool = False
    """Whether it is a server of its own, whose copies are tasks of an elastic group."""


BACKENDS: Final = {
    backend.name: backend
    for backend in (
        Backend("fsdp", "dtc", halves=True),
        Backend("archon", "dtpce", halves=True),
        Backend("megatron", "dtpce", halves=True),
        Backend("native", "dt", trains=False),
        Backend("sglang", "dtp", trains=False, serves=True),
        Backend("vllm", "dtp", trains=False, serves=True),
    )
}
