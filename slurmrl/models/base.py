"""The contract of all decoders: the built-in ones and transformers' models.

T packed tokens, S sequences, h hidden size, V vocabulary. A decoder may be built under
``torch.device("meta")``; its parameters and ``constants`` are its only state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn

from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.experts import Balance
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.recompute import Recompute
from slurmrl.tensors.ops.arguments import OnHost
from slurmrl.tensors.ops.sampling import Support


class DecodeSession(Protocol):
    """A batch of rows that a decoder extends token by token."""

    @property
    def lengths(self) -> Tensor:
        """[S] tokens read so far of each row."""
        ...

    def prompts(self, input_ids: Tensor) -> Tensor:
        """Read the packed prompts [T]. Return the logits [S, V] after each prompt."""
        ...

    def next(self, tokens: Tensor, alive: Tensor, longest: int) -> Tensor:
        """Read one more token [S] of each row; then no row has more than ``longest``. Return the
        logits [S, V] after it. Rows that are not ``alive`` [S] do not advance, and their logits
        are meaningless."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows only, in this order; a row may occur several times."""
        ...


class PackedModel(nn.Module, ABC):
    """A causal model over packed sequences with a language-model or a value head."""

    config: ModelConfig | HFConfig
    head: Head
    balance: Balance | None = None
    """The load-balancing loss, if the config requests one."""

    @property
    @abstractmethod
    def layers(self) -> Iterable[nn.Module]:
        """The units of sharding and checkpointing."""

    @property
    def embedding(self) -> nn.Module | None:
        """The embedding, if it is a sharding unit: it shares its weight with no other module."""
        return None

    @property
    def projection(self) -> nn.Module | None:
        """The vocabulary projection, if it is a sharding unit."""
        return None

    @abstractmethod
    def use(self, recompute: Recompute) -> None:
        """Set which activations are recomputed in the backward pass instead of kept."""

    @abstractmethod
    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | OnHost, max_len: int) -> Tensor:
        """input_ids [T], cu_seqlens [S+1] int32 in host memory, longest sequence -> features
        [T, h] that ``logprobs`` and ``values`` read."""

    @abstractmethod
    def logprobs(
        self,
        features: Tensor,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        temperature: float,
        support: Support | None = None,
    ) -> tuple[Tensor, Tensor]:
        """log p(x_t | x_<t) and the entropy of the distribution that x_t was drawn from, both
        [T] and 0 at the first token of a sequence; float64 if the model is, else float32. The
        distributions are restricted to ``support``."""

    @abstractmethod
    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Values [T] in the dtype of ``logprobs``. A model split over ranks needs ``cu_seqlens``
        [S+1]."""

    @abstractmethod
    def session(
        self, lengths: Sequence[int], new_tokens: int, prefill_tokens: int
    ) -> DecodeSession:
        """A session for prompts of ``lengths`` and up to ``new_tokens`` more tokens of each. Whole
        prompts of together ``prefill_tokens`` are read at a time; a longer one by itself."""

    def constants(self) -> dict[str, Tensor]:
        """Tensors by name that no optimizer step changes but that checkpoints and exports include.
        The built-in decoders have none."""
        return {}
