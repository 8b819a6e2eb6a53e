"""The models that are in device memory only while they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from slurmrl.engines.base import Engine


class Residence:
    """A rank's engines, of which those of the ``offloaded`` models wait without device memory.

    Those of them whose weights are ``moved`` there stay until others need the memory: a step may
    generate several times before, and each absence costs a move.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        offloaded: Collection[str],
        moved: Collection[str] = (),
    ) -> None:
        self._engines = {name: engines[name] for name in engines if name in offloaded}
        self._moved = frozenset(moved) & frozenset(offloaded)
        self._staying: set[str] = set()
        """On any rank, so that all ranks agree."""
        for engine in self._engines.values():
            engine.offload()

    @contextmanager
    def using(self, *models: str) -> Iterator[None]:
        """The models are in device memory for the duration of the block, as far as this rank holds
        parts of them. After an exception they stay there."""
        for name in models:
            if name in self._engines:
                self._engines[name].onload()
        yield
        self._staying.update(self._moved.intersection(models))
        self._offload(name for name in models if name not in self._moved)

    def make_room(self, *needed: str) -> Collection[str]:
        """Offload the models that have stayed, except those that are ``needed``; return them."""
        left = self._staying.difference(needed)
        self._staying -= left
        self._offload(left)
        return left

    def _offload(self, models: Iterable[str]) -> None:
        for name in models:
            if name in self._engines:
                self._engines[name].offload()
