"""The contract of engines. An engine answers requests for completions in any order.

All code of an engine runs in one asyncio loop. An engine in this process blocks the loop while it
computes, so tools and rewards must run in other processes or threads.
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
"""Function that turns token ids into a string with special tokens."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of generation."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Minimum number of new tokens before a stop token is sampled."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion after ``min_new_tokens``. The token that completes the string
    is kept."""
    masks: bool = False
    """Whether to record the sampling mask of each token: the tokens that ``top_k`` and ``top_p``
    keep. Log-probabilities are then relative to the mask, never to all tokens."""
    experts: bool = False
    """Whether to record the experts that process each token."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens exceeds its maximum"),
            (self.temperature > 0, "temperature must be above 0 (instead of 0, use greedy)"),
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
    """Request for completions of one prompt.

    The completions depend only on ``seed``, ``step``, ``keys``, the options and the weights, not on
    other requests of the engine.
    """

    request_id: str
    """Name that is unique among the requests of an engine."""
    prompt: tuple[int, ...]
    """Token ids, at least one id."""
    keys: tuple[int, ...]
    """Random stream of each completion, int64. Completions of one request share the prompt's cache.
    """
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
        """Seed of a server's random numbers for the only completion: 0 to 2**63 - 1."""
        (key,) = self.keys
        return start(self.seed, self.step, key) & (2**63 - 1)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> GenerationRequest:
        """Make a request from the result of ``dataclasses.asdict``, even from its JSON."""
        options = dict(values["options"])
        for name in ("stop_token_ids", "stop_strings"):
            options[name] = tuple(options[name])
        tokens = {name: tuple(values[name]) for name in ("prompt", "keys", "images")}
        return cls(**{**values, **tokens, "options": GenerationOptions(**options)})


ABORTED = Completion(finish="aborted")
"""Completion of a request that was aborted before its first token."""


@dataclass(frozen=True, kw_only=True)
class WeightVersion:
    """A version of the weights that an engine can serve."""

    name: str
    """Name: ``<step>.<incarnation>``."""
    folder: Path | None = None
    """Folder of a Hugging Face checkpoint; None if the engine's tensors have the weights already.
    """


class RolloutEngine(ABC):
    """One engine: a model in this process, or a server."""

    @property
    @abstractmethod
    def version(self) -> str | None:
        """The weight version that samples the next token; None before the first update."""

    @abstractmethod
    def submit(self, request: GenerationRequest) -> asyncio.Future[tuple[Completion, ...]]:
        """Queue a request.

        The future returns one completion for each key. The future fails with UsageError for a
        request that can never be served (an empty prompt, or a prompt longer than the context), and
        with RunFailedError if the engine is lost.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request: its future returns the tokens sampled so far, with the finish ``aborted``.

        Do nothing if the request is unknown or has ended.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Return when no more tokens are sampled. Requests keep their tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue sampling after ``pause``."""

    @abstractmethod
    async def update_weights(self, version: WeightVersion) -> None:
        """Return when ``version`` is served.

        Requests in flight keep their tokens and continue with ``version``. No token is sampled
        during the update.
        """

    @abstractmethod
    async def health(self) -> None:
        """Check that the engine answers, or raise RunFailedError with the reason."""

    @abstractmethod
    async def close(self) -> None:
        """Free the engine's resources. Requests in flight fail with RunFailedError."""
