"""One model function call: a node of the graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Method(StrEnum):
    """What a call does with its model."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"


@dataclass(frozen=True)
class Call:
    """``interface`` is the ``module:Class`` that offers ``method``. A call without a role (a rule
    reward) needs no model."""

    name: str
    role: str | None
    method: Method
    interface: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it gives; a reward of the user's own may add to them."""
