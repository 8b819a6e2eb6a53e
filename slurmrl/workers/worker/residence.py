"""The models that are in device memory only while they are used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from slurmrl.engines.base import Engine


class Residence:
    """A rank's engines, of which those of the ``offloaded`` models wait without device memory."""

    def __init__(self, engines: Mapping[str, Engine], offloaded: Collection[str]) -> None:
        self._engines = {name: engines[name] for name in engines if name in offloaded}
        for engine in self._engines.values():
            engine.offload()

    @contextmanager
    def using(self, *models: str) -> Iterator[None]:
        """The models are in device memory for the duration of the block, as far as this rank holds
        parts of them. After an exception they stay there."""
        used = [self._engines[name] for name in models if name in self._engines]
        for engine in used:
            engine.onload()
        yield
        for engine in used:
            engine.offload()
