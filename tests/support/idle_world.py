"""A worker of a group beside the trainers: it joins its own world and has no work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slurmrl.parallel import device
from slurmrl.parallel.activity import Activity
from slurmrl.paths import RunPaths
from slurmrl.workers.messages import Done, Order, Ready, Start
from slurmrl.workers.worker.distributed import join

WORKER = "tests.support.idle_world:IdleWorker"


class IdleWorker:
    def __init__(
        self,
        paths: RunPaths,
        rank: int,
        start: Start,
        listener: int | None,
        activity: Activity,
        say: Any,
    ) -> None:
        activity.begin("idle", None)
        self._rank = rank
        self._store = join(start, rank, listener, device.choose(0), timedelta(seconds=120))
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        self._ranks = int(ranks)

    def ready(self) -> Ready:
        return Ready(rank=self._rank, size=0, fingerprint=f"a world of {self._ranks}")

    def execute(self, order: Order, say: Any) -> Done:
        raise AssertionError(f"the trainers' work is not for this world: {order}")

    def close(self) -> None:
        pass
