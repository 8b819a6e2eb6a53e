"""How an algorithm uses a model role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Head: TypeAlias = Literal["lm", "value"]


@dataclass(frozen=True)
class RoleUse:
    """``head`` is what stands on the decoder's body: a language model's or a scalar value's."""

    role: str
    trained: bool
    head: Head = "lm"
