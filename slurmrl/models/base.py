"""The contract of all decoders: the built-in decoders and transformers' models.

Shapes: T packed tokens, S sequences, h hidden size. A decoder may be built under
``torch.device("meta")``; its parameters and ``constants`` are its only state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal

from torch import Tensor, nn

from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.experts import Balance
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.recompute import Recompute
from slurmrl.tensors.ops.arguments import OnHost
from slurmrl.tensors.ops.sampling import SamplingMasks

RowKind = Literal["packed", "single"]
"""Kind of a batch's rows: several sequences one after the other, or one padded sequence."""


class PackedModel(nn.Module, ABC):
    """A causal model over packed sequences with a language-model or a value head."""

    config: ModelConfig | HFConfig
    head: Head
    balance: Balance | None = None
    """The load-balancing loss, if the config requests one."""

    rows: RowKind | None = None
    """Layout of a micro-batch as rows of equal width; None for a model without such rows."""

    @property
    @abstractmethod
    def layers(self) -> Iterable[nn.Module]:
        """Modules that are units of sharding and activation checkpointing."""

    @property
    def embedding(self) -> nn.Module | None:
        """Embedding as a sharding unit; None, for example, if another module shares its weight."""
        return None

    @property
    def projection(self) -> nn.Module | None:
        """Vocabulary projection if it is a sharding unit."""
        return None

    @abstractmethod
    def use(self, recompute: Recompute) -> None:
        """Set which activations the backward pass recomputes."""

    @abstractmethod
    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | OnHost, max_len: int) -> Tensor:
        """Return the features [T, h] that ``logprobs`` and ``values`` read.

        ``input_ids`` is [T], and ``cu_seqlens`` [S+1] int32 is in host memory. ``max_len`` is the
        length of the longest sequence.
        """

    @abstractmethod
    def logprobs(
        self,
        features: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        masks: SamplingMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log p(x_t | x_<t) and entropies, [T] each and 0 at the first token of a sequence.

        Entry t of the entropies belongs to the distribution from which x_t was sampled. The
        distributions are restricted to ``masks``. Both results are float64 for a float64 model,
        else float32.
        """

    @abstractmethod
    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return values [T] in the dtype of ``logprobs``.

        A model that is split over ranks needs ``cu_seqlens`` [S+1].
        """

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors of checkpoints and exports that no optimizer step changes."""
        return {}
