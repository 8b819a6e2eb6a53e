"""What an allocation string means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from slurmrl.allocation.backends import AXIS_OF

AXES: Final = tuple(AXIS_OF.values())


@dataclass(frozen=True)
class Allocation:
    """A backend and the size of every axis (1 where the string does not say). ``str`` gives a
    string that parses back to an equal allocation."""

    backend: str
    name: str = ""
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))

    @property
    def world_size(self) -> int:
        """Ranks that it takes. Experts are spread over the ranks of the other axes."""
        return self.sizes["dp"] * self.sizes["tp"] * self.sizes["pp"] * self.sizes["cp"]

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        written = [f"{d}{self.sizes[a]}" for d, a in AXIS_OF.items() if self.sizes[a] > 1]
        return f"{self.backend}{name}:{''.join(written) or 'd1'}"

    def __hash__(self) -> int:
        return hash(str(self))
