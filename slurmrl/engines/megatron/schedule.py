"""One pass of micro-batches through megatron's schedules, and broadcasts from the last stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slurmrl.engines.megatron.layers import Micro
from slurmrl.engines.megatron.model import Chunk

Use = Callable[[int, Tensor, Micro, Chunk], Tensor]
"""(number of the micro-batch, hidden states, micro-batch, chunk) -> a loss; on the last stage."""


class PipelineSchedule:
    """The pipeline of one model: 1F1B or interleaved, or micro-batch after micro-batch."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        settings: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        self.groups = groups
        self._chunks = list(chunks)
        self._virtual = settings.virtual_pipeline_model_parallel_size
        settings.finalize_model_grads_func = _finalize
        self._run = get_forward_backward_func(groups.pp.size(), self._virtual)
        self._peers = P2PCommunicator(groups.pp, settings)
        self._hidden = settings.hidden_size

    def micro_batches(self, wanted: int) -> int:
        """Number of micro-batches to run for ``wanted`` ones: interleaving needs whole groups."""
        group = self.groups.pp.size() if self._virtual else 1
        return -(-wanted // group) * group

    def run(self, count: int, micro: Callable[[int], Micro], use: Use, *, backward: bool) -> None:
        """Run the forward and optionally the backward passes of ``count`` micro-batches.

        Then reduce the gradients over ranks.
        """
        self._run(
            forward_step_func=partial(self._step, micro=micro, use=use),
            data_iterator=[iter(range(count)) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=count,
            seq_length=0,  # sizes vary and are sent ahead
            micro_batch_size=1,
            forward_only=not backward,
            p2p_communicator=self._peers,
            pg_collection=self.groups,
        )

    def _step(
        self,
        numbers: Iterator[int],
        model: nn.Module,
        *,
        micro: Callable[[int], Micro],
        use: Use,
    ) -> tuple[Tensor, Any]:
        number = next(numbers)
        batch = micro(number)
        chunk: Any = getattr(model, "module", model)
        hidden = model(
            **chunk.share(batch),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=batch.params,
        )

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, None]:
            # Megatron would divide by this number of tokens; the engine has divided already.
            counted = torch.zeros((), dtype=torch.int, device=hidden.device)
            return use(number, hidden, batch, chunk), counted, None

        return hidden, loss

    @property
    def is_last(self) -> bool:
        """Whether this rank makes outputs."""
        return bool(self.groups.pp.rank() == self.groups.pp.size() - 1)

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Return the last stage's tensor on all stages, of this shape and type on each."""
        if self.groups.pp.size() > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=self.groups.pp, group_src=self.groups.pp.size() - 1)
        return tensor

    def broadcast_stats(self, values: dict[str, float], device: torch.device) -> dict[str, float]:
        """Return the last stage's statistics on all stages."""
        if self.groups.pp.size() == 1:
            return values
        text = json.dumps(values).encode()
        size = self.broadcast_from_last(torch.tensor(len(text), device=device))
        own = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if self.is_last:
            own = torch.tensor(list(text), dtype=torch.uint8, device=device)
        stats: dict[str, float] = json.loads(bytes(self.broadcast_from_last(own).tolist()))
        return stats


def _finalize(
    chunks: list[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **_: Any,
) -> None:
    """Reduce gradients without scaling: the engine has divided the losses already."""
    finalize_model_grads(chunks, None, pg_collection=pg_collection)
