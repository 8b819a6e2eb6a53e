"""The contract of all decoders: the built-in ones, and transformers' models in their place.

T packed tokens, S sequences, h hidden size, V vocabulary. A decoder may be built under
``torch.device("meta")``; its parameters and ``constants`` are its only state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from slurmrl.models.balance import Balance
from slurmrl.models.config import Head, ModelConfig
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.recompute import Recompute


class DecodeSession(Protocol):
    """A batch of rows that a decoder reads token by token."""

    @property
    def lengths(self) -> Tensor:
        """[S] tokens read of each row."""
        ...

    def prompts(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Read packed prompts [T]; the logits [S, V] behind each."""
        ...

    def next(self, tokens: Tensor, alive: Tensor) -> Tensor:
        """Read one more token [S] of each row; the logits [S, V] behind it. Rows that are not
        ``alive`` [S] stay where they are, and their logits mean nothing."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        ...


class PackedModel(nn.Module, ABC):
    """A causal model over packed sequences with a language-model or a value head."""

    config: ModelConfig | HFConfig
    head: Head
    balance: Balance | None = None
    """The load-balancing loss that the config asks for."""

    @property
    @abstractmethod
    def layers(self) -> Iterable[nn.Module]:
        """The modules to wrap one by one (sharding, checkpointing)."""

    @abstractmethod
    def use(self, recompute: Recompute) -> None:
        """Say what is recomputed in backward passes instead of being kept."""

    @abstractmethod
    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, max_len: int) -> Tensor:
        """input_ids [T], cu_seqlens [S+1] int32, longest sequence -> features [T, h] that
        ``logprobs`` and ``values`` read."""

    @abstractmethod
    def logprobs(
        self, features: Tensor, input_ids: Tensor, cu_seqlens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """log p(x_t | x_<t) and the entropy of the distribution that x_t was drawn from, both
        [T] and 0 at the first token of a sequence; float64 where the model is, else float32."""

    @abstractmethod
    def values(self, features: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Values [T], of the dtype of ``logprobs``; a model that is split over ranks needs
        ``cu_seqlens`` [S+1]."""

    @abstractmethod
    def reader(self, lengths: Tensor, new_tokens: int) -> DecodeSession:
        """For prompts of ``lengths`` [S] and up to ``new_tokens`` more of each."""

    def constants(self) -> dict[str, Tensor]:
        """Tensors that belong to the model, in checkpoints and exports too, and that no step
        changes, by name; the built-in decoders have none."""
        return {}
