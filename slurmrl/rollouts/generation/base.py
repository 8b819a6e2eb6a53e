"""The contract of engines that serve requests for completions, one by one and in any order.

All code of an engine runs in one asyncio loop. An engine in this process computes between two
awaits, so tools and rewards must run in other processes or threads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmrl.errors import UsageError
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.image_requests import PromptImage
from slurmrl.tensors.ops.splitmix import start

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of generation."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens are not sampled before this many new tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion after ``min_new_tokens``; the completing token is kept."""
    masks: bool = False
    """Record the sampling mask of each token: the tokens that ``top_k`` and ``top_p`` keep.
    Log-probabilities are then relative to the mask, never to all tokens."""
    experts: bool = False
    """Record the experts that process each token."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be at most max"),
            (self.temperature > 0, "temperature must be above 0 (use greedy for the most likely)"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k is None or self.top_k >= 1, "top_k must be at least 1"),
            (all(self.stop_strings), "stop_strings must not contain empty strings"),
            (
                not self.masks or (self.top_k is not None and not self.greedy),
                "a recorded sampling mask needs top_k and sampling that is not greedy",
            ),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise UsageError(f"{self}: " + "; ".join(broken))


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Completions of one prompt.

    Their tokens depend only on ``seed``, ``step``, ``keys``, the options and the weights, not on
    other requests of the engine.
    """

    request_id: str
    """Unique among the requests of an engine."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    keys: tuple[int, ...]
    """int64; the random stream of each completion. Completions of one request share the prompt's
    cache."""
    seed: int
    step: int
    options: GenerationOptions
    priority: int = 0
    """Requests with a lower number begin first."""
    pictures: str = ""
    """Path of the prompt's prepared pictures (`tensors.pictures`); "" for none."""
    images: tuple[PromptImage, ...] = ()
    """The content of ``pictures``, once the client of a server has read it."""

    @property
    def server_seed(self) -> int:
        """The random stream of the only completion on a server: 0 to 2**63 - 1."""
        (key,) = self.keys
        return start(self.seed, self.step, key) & (2**63 - 1)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> GenerationRequest:
        """Return the inverse of ``dataclasses.asdict``, even after a round trip through JSON."""
        options = dict(values["options"])
        for name in ("stop_token_ids", "stop_strings"):
            options[name] = tuple(options[name])
        tokens = {name: tuple(values[name]) for name in ("prompt", "keys", "images")}
        return cls(**{**values, **tokens, "options": GenerationOptions(**options)})


ABORTED = Completion(finish="aborted")
"""Completion of a request that was aborted before its first token."""


@dataclass(frozen=True, kw_only=True)
class WeightVersion:
    """Weights for an engine to serve."""

    name: str
    """``<step>.<incarnation>``"""
    folder: Path | None = None
    """A Hugging Face checkpoint of the weights. None: the engine's tensors already have them."""


class RolloutEngine(ABC):
    """One instance of an engine: a model in this process, or a server."""

    @property
    @abstractmethod
    def version(self) -> str | None:
        """The weight version that samples the next token. None: none was installed yet."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        """Queue a request.

        The future gets one completion for each key; it fails with UsageError for a request that can
        never be served (an empty prompt, one longer than the context), and with RunFailedError if
        the engine is lost.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request: its future gets the tokens sampled so far as ``aborted``.

        No-op if it is unknown or has ended.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling before returning. Requests keep their tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Undo ``pause``."""

    @abstractmethod
    async def update_weights(self, version: WeightVersion) -> None:
        """Serve ``version`` after the return.

        Requests in flight continue with it after their current tokens. No token is sampled during
        the update.
        """

    @abstractmethod
    async def health(self) -> None:
        """Return if the engine answers; raises RunFailedError with the reason."""

    @abstractmethod
    async def close(self) -> None:
        """Free the engine's resources. Requests in flight fail with RunFailedError."""
