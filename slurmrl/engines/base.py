"""The contracts of engines for training and for generation.

One engine may fulfill both contracts. Algorithms do not depend on the engine.

T is the number of packed tokens. Per-token outputs are aligned with the tokens: ``logp[t]`` is log
p(x_t | x_<t), ``entropy[t]`` is the entropy of the distribution from which x_t was sampled, and
``values[t]`` is the value after reading token t. At the first token of a sequence, ``logp`` and
``entropy`` are 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.rollouts.generation.base import Decode, RolloutEngine
from slurmrl.tensors.checkpoint.shards import RoleSnapshot
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.tensors.layout import Layout
from slurmrl.tensors.parallel.groups import ParallelContext

Outputs = dict[str, Tensor]
"""``{logp, entropy}`` of a language model, ``{values}`` of a value model; each [T] float32."""
OUTPUTS: dict[Head, tuple[str, ...]] = {"lm": ("logp", "entropy"), "value": ("values",)}
LossFn = Callable[[Outputs, SequenceSample], tuple[Tensor, dict[str, Tensor]]]
"""Function from (outputs of whole sequences, micro-batch) to (sum of losses, sums of statistics),
all scalars. Statistics whose names end in `MAXIMUM` are maxima instead of sums."""
MAXIMUM = "_max"
Veto = Callable[[Mapping[str, float]], bool]
"""Function that decides from the global sums of a step's statistics whether to skip the update."""
OutputFn = Callable[[Outputs, SequenceSample], Outputs]
"""Function from (outputs of whole sequences, micro-batch) to per-token results, each [T]."""

Served = RolloutEngine | None
"""Engine to which a rank submits requests; None for a rank without requests."""

TOKENS = "input_ids"


def spaced(tensors: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return equally spaced elements of each tensor, at most about ``most`` in all."""
    # The step must be odd: an even step could select only some columns of the matrices.
    every = sum(each.numel() for each in tensors) // most | 1
    return [each.detach().reshape(-1)[::every] for each in tensors]


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options for serving requests with an engine of the trainers' world; servers ignore them."""

    rows: int = 256
    """Maximum number of sequences that are generated at a time; further sequences wait."""
    cache_bytes: int | None = None
    """Maximum memory of a rank for keys and values. Default: most of the free memory on a GPU, else
    as much as the sequences need."""
    decode: Decode | None = None
    """Function from token ids to text, for stop strings."""
    turns: bool = True
    """Whether a request may continue the sequence of an earlier request. Without turns all requests
    are submitted at once."""
    masked: bool = True
    """Whether log-probabilities refer to the distribution after top-k and top-p, instead of the
    whole distribution."""
    settled: Callable[[], Awaitable[None]] | None = None
    """Function that returns once no caller can send a request before it gets an answer. Engines
    with rounds of requests await this function. Default: return at once."""


class Engine(ABC):
    """One model of one role, spread over the ranks of ``context``.

    Methods that compute are collective: every rank of the model calls them in the same order. Each
    data-parallel rank has its own sample, which may be empty. Ranks that differ only along other
    axes have the same sample and get the same results.
    """

    role: str
    head: Head
    config: ModelConfig | HFConfig
    context: ParallelContext
    frozen: str | None = None
    """The `Fingerprint` of the frozen weights to which adapters belong; None without adapters."""

    @abstractmethod
    def layout(self) -> Layout:
        """Return the placement of the weights on the model's ranks."""

    @abstractmethod
    def storages(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors by the storage names of ``layout``. Collective.

        The tensors are contiguous and not copied. With adapters, a tensor is a merged copy that is
        made when it is read. A call of the engine may replace the tensors.
        """

    def trained_layout(self) -> Layout:
        """Return the layout of the tensors in a weight version.

        With adapters, a version has only the trained tensors, otherwise all weights.
        """
        return self.layout()

    def trained_storages(self) -> Mapping[str, Tensor]:
        """Return this rank's tensors by the storage names of `trained_layout`. Collective."""
        return self.storages()

    def updated(self, most: int) -> list[Tensor]:
        """Return about ``most`` equally spaced float32 values of the weights this rank updates.

        With adapters, the values are taken from the merged weights. Collective.
        """
        held = self.storages().values()
        return spaced([each for each in held if each.dtype == torch.float32], most)

    @abstractmethod
    def offload(self) -> None:
        """Free the device memory of weights and optimizer state.

        Until ``onload``, methods that need the weights raise UsageError.
        """

    @abstractmethod
    def onload(self) -> None:
        """Undo ``offload``."""

    def wait_until_up(self, report: Callable[[], None]) -> None:  # noqa: B027 - most need no wait
        """Wait until the engine can compute, and call ``report`` periodically."""

    @property
    def served_types(self) -> Collection[str] | None:
        """Data types in which the servers compute; None on a rank without a server."""
        return None

    def close(self) -> None:  # noqa: B027 - most engines hold nothing else
        """Release the engine's resources outside this process's memory."""


class TrainEngine(Engine):
    """An engine that trains a model, or runs a frozen model on whole sequences."""

    trained: bool

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of optimizer steps taken."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the data-parallel ranks, in place."""
        if self.context.dp_size > 1:
            dist.all_reduce(tensor, group=self.context.group("dp"))
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its maximum over the data-parallel ranks, in place."""
        if self.context.dp_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.context.group("dp"))
        return tensor

    def vetoed(self, veto: Veto | None, stats: Mapping[str, float]) -> bool:
        """Return whether ``veto`` skips the update.

        All ranks get the same answer, even if rounding differs between ranks that work on the same
        samples. Collective.
        """
        if veto is None:
            return False
        own = veto(stats)
        if "data" not in self.context.groups:
            return own
        skip = torch.tensor(int(own), device=self.context.device)
        dist.all_reduce(skip, dist.ReduceOp.MAX, group=self.context.group("data"))
        return bool(skip)

    @abstractmethod
    def train_batch(
        self,
        sample: SequenceSample,
        loss_fn: LossFn,
        denominator: float,
        *,
        temperature: float = 1.0,
        veto: Veto | None = None,
    ) -> dict[str, float]:
        """Run one optimizer step on the gradient of (sum of losses) / (sum of denominators).

        Both sums are over all micro-batches and data-parallel ranks; ``denominator`` is this rank's
        share. The sequences of an item are in one micro-batch (`SequenceSample.sequences` separates
        them).

        The result is the same on every rank: the sums (maxima) of ``loss_fn``'s statistics and
        ``loss`` (divided), ``grad_norm`` (before clipping), ``lr``, ``tokens``, ``denominator``. If
        the gradient is not finite, the update is skipped and ``skipped`` is 1. ``veto`` gets the
        sums of the statistics, with ``loss``, ``tokens`` and ``denominator``. If ``veto`` returns
        true, the update is skipped and ``vetoed`` is 1.
        """

    @abstractmethod
    def forward(
        self,
        sample: SequenceSample,
        output_fn: OutputFn | None = None,
        *,
        temperature: float = 1.0,
    ) -> Outputs:
        """Return outputs without gradients, or the results of ``output_fn`` on them.

        Each tensor is [T] in the order of the sample. A micro-batch may have only some of an item's
        sequences.
        """

    def base(self) -> AbstractContextManager[None]:
        """Compute with the frozen weights only, without adapters, while the context is entered.

        Raises UsageError if the model has no adapters.
        """
        raise UsageError(f"{self.role} has no adapters, so it cannot be its own reference")

    @abstractmethod
    def snapshot(self, *, copy: bool = True) -> RoleSnapshot | None:
        """Return this rank's part of a checkpoint; None if the model is not trained.

        The part is a copy in host memory: training does not change it, and the next snapshot
        overwrites it. Without ``copy``, write the part before any other call of the engine.
        """

    def save(self, directory: Path) -> list[SavedFile]:
        """Write this rank's part of a checkpoint durably. No-op if the model is not trained."""
        snapshot = self.snapshot(copy=False)
        return [] if snapshot is None else snapshot.write(directory)

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Resume from a checkpoint of any number of ranks. No-op if the model is not trained.

        Raises CheckpointError for an incomplete checkpoint or a checkpoint of a different model.
        """


class GenerateEngine(Engine):
    """Engine of the trainers' world that serves requests, on each data-parallel rank by itself."""

    @abstractmethod
    def serving(self, version: str, options: ServingOptions) -> AbstractContextManager[Served]:
        """Serve requests with the current weights, named ``version``, while entered.

        Collective: every rank of the model enters and leaves, with or without requests.

        Among ranks with the same samples, the leader gets the engine. The other ranks get None, and
        compute the leader's requests until the leader leaves. Without ``options.turns``, the other
        ranks may get an engine too; then all of these ranks submit the same requests.

        Raises UsageError for options that the model does not support.
        """
