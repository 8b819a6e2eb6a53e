"""The engines that an allocation string may name, and the meaning of a string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from slurmrl.errors import AllocationError, UnknownNameError
from slurmrl.registry import near

AXIS_OF: Final = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
"""Axis of each letter in an allocation string. Strings have the letters in this order."""
AXES: Final = tuple(AXIS_OF.values())
ATTENTION_LETTERS: Final = "dtpc"
EXPERT_LETTERS: Final = "dtpe"


@dataclass(frozen=True)
class Backend:
    """An engine that an allocation string may name."""

    name: str
    dimensions: str
    """Letters of the axes that the engine supports."""
    trains: bool = True
    """Whether the engine can train; otherwise it only generates."""
    halves: bool = False
    """Whether attention and experts may have different layouts: ``(attn:…|ffn:…)``."""
    serves: bool = False
    """Whether the engine runs as servers. A copy of the model is then a task of a group."""


BACKENDS: Final = {
    backend.name: backend
    for backend in (
        Backend("fsdp", "dtc", halves=True),
        Backend("megatron", "dtpce", halves=True),
        Backend("native", "dt", trains=False),
        Backend("sglang", "dtp", trains=False, serves=True),
        Backend("vllm", "dtp", trains=False, serves=True),
    )
}


ARCHON: Final = "archon"
"""Name of AReaL's engine. Layouts with p or e then run on ``megatron``, others on ``fsdp``."""
SPELLED: Final = {**BACKENDS, ARCHON: Backend(ARCHON, "dtpce", halves=True)}
"""Mapping from a name with which an allocation string may begin to the engine."""


@dataclass(frozen=True)
class ExpertSizes:
    """The experts' layout over the ranks of a pipeline stage.

    The experts are divided into ``ep`` parts. Each expert is split over ``tp`` ranks and has ``dp``
    copies. Megatron calls these sizes ep, etp and edp.
    """

    dp: int
    tp: int
    ep: int


@dataclass(frozen=True)
class Allocation:
    """An engine and the size of every axis, which is 1 by default.

    ``experts`` is None if the model has no experts, or if they have the layout of its other layers.

    ``str()`` returns a string that parses to an equal allocation. The constructor raises
    AllocationError if attention and experts need different numbers of ranks.
    """

    backend: str
    """Name of an engine in `BACKENDS`."""
    name: str = ""
    sizes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    experts: ExpertSizes | None = None

    def __post_init__(self) -> None:
        if self.backend == ARCHON:
            split = self.experts is not None or max(self.sizes["pp"], self.sizes["ep"]) > 1
            object.__setattr__(self, "backend", "megatron" if split else "fsdp")
        if self.experts is None and self.sizes["ep"] > 1:
            object.__setattr__(self, "experts", self._spread_experts())
        if self.experts is not None:
            self._check_experts(self.experts)

    @property
    def world_size(self) -> int:
        """Number of ranks. Experts share the ranks of the other layers."""
        return self.sizes["dp"] * self.sizes["tp"] * self.sizes["pp"] * self.sizes["cp"]

    @property
    def stage_size(self) -> int:
        """Number of ranks in one pipeline stage."""
        return self.world_size // self.sizes["pp"]

    @property
    def instance_size(self) -> int:
        """Number of ranks of one copy of the model."""
        return self.sizes["tp"] * self.sizes["pp"]

    @property
    def etp(self) -> int:
        """Number of ranks that share one expert."""
        return self.experts.tp if self.experts else 1

    @property
    def edp(self) -> int:
        """Number of copies of each expert."""
        return self.experts.dp if self.experts else self.sizes["dp"]

    def explain(self) -> dict[str, Any]:
        """Return the sizes as plain values; split them if experts have a separate layout."""
        shown: dict[str, Any] = {
            "backend": self.backend,
            "name": self.name or None,
            "string": str(self),
            "world_size": self.world_size,
            **self.sizes,
            "etp": self.etp,
            "edp": self.edp,
        }
        if self.experts is not None:
            world_size, pp = self.world_size, self.sizes["pp"]
            dense = {axis: self.sizes[axis] for axis in ("dp", "pp", "tp", "cp")}
            half = {"dp": self.edp, "pp": pp, "tp": self.etp, "ep": self.sizes["ep"]}
            shown["attn"] = {**dense, "world_size": world_size}
            shown["ffn"] = {**half, "world_size": world_size}
        return shown

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        dense = {letter: self.sizes[axis] for letter, axis in AXIS_OF.items()}
        if not self._has_halves:
            return f"{self.backend}{name}:{_written(dense)}"
        half = {"d": self.edp, "t": self.etp, "p": self.sizes["pp"], "e": self.sizes["ep"]}
        attention = _written(dense | {"e": 1})
        return f"{self.backend}{name}:(attn:{attention}|ffn:{_written(half)})"

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def _has_halves(self) -> bool:
        """Whether the string must spell both halves because its short form means another layout."""
        if self.experts is None:
            return False
        return self.sizes["ep"] == 1 or self.experts != self._spread_experts()

    def _spread_experts(self) -> ExpertSizes:
        """Return the default layout: the ranks of a stage share the experts and split no expert."""
        ep = self.sizes["ep"]
        if self.stage_size % ep:
            raise AllocationError(
                f"e{ep} does not divide the {self.stage_size} ranks (d*t*c) of a pipeline stage; "
                f"allowed: {divisors(self.stage_size)}"
            )
        return ExpertSizes(self.stage_size // ep, 1, ep)

    def _check_experts(self, experts: ExpertSizes) -> None:
        product = experts.dp * experts.tp * experts.ep
        if product != self.stage_size or experts.ep != self.sizes["ep"]:
            raise AllocationError(
                f"attention needs {self.world_size} ranks (d*t*p*c) and the experts need "
                f"{product * self.sizes['pp']} (d*t*p*e): the numbers must be equal"
            )


def _written(sizes: Mapping[str, int]) -> str:
    return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"


def divisors(number: int) -> str:
    """Return the twelve smallest divisors, separated by commas."""
    found = [str(size) for size in range(1, min(number, 4096) + 1) if number % size == 0]
    return ", ".join(found[:12]) + (", …" if len(found) > 12 else "")


@dataclass(frozen=True)
class Components:
    """Allocations, grouped by their places, which are disjoint, consecutive sets of ranks.

    ``str()`` returns a string that parses to equal components.
    """

    places: tuple[tuple[Allocation, ...], ...]

    @property
    def world_size(self) -> int:
        """Total number of ranks of all places."""
        return sum(place[0].world_size for place in self.places)

    def __iter__(self) -> Iterator[Allocation]:
        return (allocation for place in self.places for allocation in place)

    def __len__(self) -> int:
        return sum(len(place) for place in self.places)

    def __getitem__(self, name: str) -> Allocation:
        """Return the component with this name. Raises UnknownNameError."""
        for allocation in self:
            if allocation.name == name:
                return allocation
        known = [allocation.name for allocation in self if allocation.name]
        raise UnknownNameError(f"no component '{name}'; {near(name, known)}")

    def starts(self) -> list[int]:
        """Return the first rank of each place."""
        sizes = [place[0].world_size for place in self.places]
        return list(accumulate(sizes[:-1], initial=0))

    def explain(self) -> dict[str, Any]:
        """Return the sizes as plain values; for several allocations, include their first ranks."""
        if len(self) == 1:
            return next(iter(self)).explain()
        parts = [
            {**allocation.explain(), "first_rank": start}
            for start, place in zip(self.starts(), self.places, strict=True)
            for allocation in place
        ]
        return {"string": str(self), "world_size": self.world_size, "components": parts}

    def __str__(self) -> str:
        return "+".join("|".join(map(str, place)) for place in self.places)
