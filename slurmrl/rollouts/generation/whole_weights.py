"""Weights whose parts are on the tensor ranks of a copy of a model, as one checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.fsio.calls import REAL
from slurmrl.models.config import ModelConfig
from slurmrl.models.hf import CONFIG_FILE, as_array
from slurmrl.models.shapes import storage_of
from slurmrl.rollouts.generation.servers import weights_config
from slurmrl.tensors.checkpoint.export import (
    in_written_order,
    write_folder,
    write_json,
    write_weights,
)
from slurmrl.tensors.checkpoint.tensors import TensorEntry, assembled, file_tensors
from slurmrl.tensors.layout import Array, Box, HeldBox, Layout, sources
from slurmrl.tensors.parallel.groups import ParallelContext


class WholeWeights:
    """Writes the weights of one copy.

    Its leader reads the parts of the other ranks one tensor at a time, so no rank ever holds more
    than its own part and one tensor.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: str,
        parameters: Sequence[str],
        layout: Layout,
        context: ParallelContext,
    ) -> None:
        self._config, self._dtype = config, dtype
        self._layout, self._context = layout, context
        self._files = file_tensors(
            ((name, layout.tensors[name]) for name in parameters), storage_of(config)
        )
        alone = context.axis_size("tp") == 1
        self._copy = [context.rank] if alone else context.topology.peers(context.rank, "tp")

    def write(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """On the leader: write ``folder``, complete or not at all, while the others `offer`."""

        def read(name: str, box: Box) -> Array:
            return as_array(self._gather(name, box, tensors[name]))

        def fill(target: Path) -> None:
            entries = [
                TensorEntry(name, file.spec, partial(assembled, read, file))
                for name, file in self._files.items()
            ]
            write_weights(target, entries)
            write_json(target / CONFIG_FILE, weights_config(self._config, self._dtype), REAL)

        write_folder(folder, fill)

    def offer(self, tensors: Mapping[str, Tensor]) -> None:
        """On the other ranks: send the leader what it lacks, in the order in which it writes."""
        entries = [TensorEntry(name, file.spec, _unread) for name, file in self._files.items()]
        for entry in in_written_order(entries):
            for name, spec, stored in self._files[entry.name].shards:
                for holder, part, box in self._senders(name, stored.of(spec.shape)):
                    if holder == self._context.rank:
                        elements = tensors[name][box.inside(part.box)].contiguous()
                        dist.send(_bytes(elements), group=self._context.group("tp"), group_dst=0)

    def _gather(self, name: str, wanted: Box, own: Tensor) -> Tensor:
        """The elements of a box."""
        whole = own.new_empty(wanted.size)
        for part, box in sources(self._layout.holders[name], wanted):
            if self._context.rank in part.ranks:
                whole[box.inside(wanted)] = own[box.inside(part.box)]
        for holder, _, box in self._senders(name, wanted):
            elements = own.new_empty(box.size)
            source = self._copy.index(holder)
            dist.recv(_bytes(elements), group=self._context.group("tp"), group_src=source)
            whole[box.inside(wanted)] = elements
        return whole

    def _senders(self, name: str, wanted: Box) -> Iterator[tuple[int, HeldBox, Box]]:
        """Yield the parts of a box that the leader lacks.

        Each is (rank that sends it, the part that this rank has, the box that is sent).
        """
        for part, box in sources(self._layout.holders[name], wanted):
            if self._copy[0] not in part.ranks:
                yield next(rank for rank in self._copy if rank in part.ranks), part, box


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory, of a type that every backend can send."""
    return tensor.view(-1).view(torch.uint8)


def _unread() -> Array:
    raise AssertionError("only the leader writes files")
