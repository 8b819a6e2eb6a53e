"""A worker of a rollout task that joins its world and generates nothing."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmrl.run.channel.message_log import LogWriter
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.parallel import device
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.distributed import join
from slurmrl.workers.messages import TO_ROLLOUT_WORKER, Ready, Retire, Serve, StartRollout
from slurmrl.workers.rollout_messages import RESULT_LOG, Joined, Leaving, RolloutCounts

WORKER = "tests.support.idle_world:IdleWorker"


class IdleWorker:
    """Rank 0 writes its pid and the number of each incarnation into the result log as counts."""

    def __init__(
        self,
        paths: RunPaths,
        rank: int,
        start: StartRollout,
        activity: Activity,
    ) -> None:
        activity.begin("idle", None)
        self._activity = activity
        self._rank = rank
        agent = start.agent
        meeting = paths.rollout_meeting(agent.group, agent.task, agent.attempt)
        join(start, rank, meeting, device.choose(0), timedelta(seconds=120))
        ranks = torch.ones(1)
        dist.all_reduce(ranks)
        self._ranks = int(ranks)
        self._results: LogWriter | None = None
        if rank == 0:
            self._results = LogWriter(
                paths.rollout_results(agent.group, agent.task, agent.attempt), durable=True
            )
            self._results.append(RESULT_LOG.to_json(Joined(agent=agent)))

    def ready(self) -> Ready:
        return Ready(rank=self._rank, size=0, fingerprint=f"a world of {self._ranks}")

    def serve(self, agent: Connection) -> None:
        self._activity.begin("idle", None)
        while (values := agent.receive(timeout_s=None)) is not None:
            match TO_ROLLOUT_WORKER.from_json(values):
                case Serve(incarnation=number):
                    self._tell(RolloutCounts(counts={"incarnation": number, "pid": os.getpid()}))
                case Retire(reason=reason):
                    self._tell(Leaving(reason=reason))
                    return

    def _tell(self, result: RolloutCounts | Leaving) -> None:
        if self._results is not None:
            self._results.append(RESULT_LOG.to_json(result))
