"""What takes weights from a process group (`vllm_broadcast`) in the processes of a vLLM server that
compute.

It runs in vLLM's environment, with vLLM's own torch, and imports little of slurmrl. What goes wrong
with an update is noted in the store of the group (`ServerGroup.notes`) instead of raised: where
several processes share a model and one raises, vLLM 0.32 leaves the answers of the others unread,
and takes them for the answers to its next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from slurmrl.engines.rollout.server_group import (
    JOIN_S,
    SEND_S,
    host_towards,
    join_group,
    note,
)
from slurmrl.engines.rollout.vllm_layers import LayersInTurn
from slurmrl.engines.rollout.vllm_plugin import CLOSED, OPEN, STATE

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers
SHOWN_CHARACTERS = 500
"""Of an error."""


@dataclass
class Joining(WeightTransferInitInfo):  # type: ignore[misc]
    """The body of ``/init_weight_transfer_engine``: a `Meeting`."""

    host: str = ""
    port: int = 0
    ranks: int = 0


@dataclass
class Receiving(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The body of ``/update_weights``: all tensors of a version, as they come."""

    topic: str
    """Of the note that says what was wrong."""
    buckets: list[dict[str, Any]]
    """Each a `Bucket`."""


class GroupReceiver(WeightTransferEngine[Joining, Receiving]):  # type: ignore[misc]
    """Takes the weights in one process of a server.

    A whole version comes within one call, at whose end the model has it, or is as good to compute
    with as before. So nothing is in the way of the next client where one was lost.
    """

    init_info_cls = Joining
    update_info_cls = Receiving
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        parallel = self.parallel_config
        before = parallel.data_parallel_index * parallel.world_size
        self._rank = 1 + before + parallel.rank
        self._group: Any = None
        self._store: Store | None = None
        self._open = False
        """Whether vLLM waits for the end of an update."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> Joining:
        """What is not known is left out: trainers of another version find out as they meet."""
        known = {field.name for field in fields(Joining)}
        return Joining(**{name: value for name, value in init_dict.items() if name in known})

    def init_transfer_engine(self, init_info: Joining) -> None:
        """Join a group, in place of the last one. The trainers notice that it did not join."""
        self.shutdown()
        problem_of(partial(self._join, init_info))

    def _join(self, joining: Joining) -> None:
        host = host_towards(joining.host)
        self._store = TCPStore(
            joining.host,
            joining.port,
            is_master=False,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
        )
        note(self._store, STATE, self._rank, OPEN if self._open else CLOSED)
        self._group = join_group(self._store, host, rank=self._rank, ranks=joining.ranks)

    def start_weight_update(self) -> None:
        self._open = True

    def finish_weight_update(self) -> None:
        self._open = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if problem_of(lambda: self.receive_weights(self.parse_update_info(update_info))):
            self.shutdown()  # the other ranks, and the trainers, notice it at once

    def receive_weights(self, update_info: Receiving) -> None:
        """Raises what is wrong with the group. Tensors that are not those of the model are received
        as well: other ranks wait for them."""
        if self._group is None or self._store is None:
            raise RuntimeError("this process has joined no group")
        with LayersInTurn(self.model, self.model_config) as layers:
            problem = problem_of(layers.begin)
            for bucket in update_info.buckets:
                load = partial(self._load, layers, self._next(bucket), bucket)
                problem = problem or problem_of(load)
                del load
            problem = problem or problem_of(layers.end)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        note(self._store, update_info.topic, self._rank, problem)

    def _next(self, bucket: dict[str, Any]) -> Tensor:
        """The bytes of the next bucket."""
        numbers = sum(torch.Size(shape).numel() for shape in bucket["shapes"])
        content = torch.empty(numbers * dtype_of(bucket).itemsize, dtype=torch.uint8)
        self._group.broadcast(content, 0, timedelta(seconds=SEND_S)).wait()
        return content

    def _load(self, layers: LayersInTurn, content: Tensor, bucket: dict[str, Any]) -> None:
        tensors, rest = [], content.view(dtype_of(bucket))
        for name, shape in zip(bucket["names"], bucket["shapes"], strict=True):
            size = torch.Size(shape).numel()
            tensors.append((name, rest[:size].view(shape)))
            rest = rest[size:]
        layers.load(tensors)

    def shutdown(self) -> None:
        self._group = self._store = None


def dtype_of(bucket: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, bucket["dtype"])
    return dtype


def problem_of(work: Callable[[], None]) -> str:
    """What has gone wrong; empty: nothing."""
    try:
        work()
    except Exception as error:  # models and drivers raise any type
        logger.exception("weights from slurmrl were not taken")
        return f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]
    return ""
