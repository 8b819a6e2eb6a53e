"""Random states per model.

megatron-core keeps its named random states in one tracker per process. A model's own states are
swapped in while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import random

from slurmrl.engines.megatron.place import Place


class RandomStates:
    """The states of one model."""

    def __init__(self, seed: int, place: Place) -> None:
        tracker = random.get_cuda_rng_tracker()
        others, default = tracker.get_states(), random._get_cuda_rng_state()
        tracker.reset()
        random.model_parallel_cuda_manual_seed(
            seed, tp_rank=place.tp_rank, ep_rank=place.ep_rank, etp_rank=place.etp_rank
        )
        self._own: dict[str, Any] = tracker.get_states()
        tracker.set_states(others)
        random._set_cuda_rng_state(default)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Swap in this model's states, and keep their new values at the end."""
        tracker = random.get_cuda_rng_tracker()
        others = tracker.get_states()
        tracker.set_states(self._own)
        try:
            yield
        finally:
            self._own = tracker.get_states()
            tracker.set_states(others)
