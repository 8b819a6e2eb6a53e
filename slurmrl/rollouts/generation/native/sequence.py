"""A completion in progress, and the search for its stop strings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurmrl.data.meta import SampledMasks
from slurmrl.errors import UsageError
from slurmrl.rollouts.completions import Completion, Finish
from slurmrl.rollouts.generation.base import Decode, GenerationRequest
from slurmrl.tensors.layout import Array
from slurmrl.tensors.ops.sampling import stream

Rank = tuple[int, int]
"""Place of a sequence in the order of service: (priority, number of its arrival)."""
SamplingKey = tuple[float, int | None, float, bool, bool]
"""Options that the rows of one call of `tensors.ops.sampling.sample` share: temperature, top k, top
p, greedy, and whether sampling masks are recorded."""
MARGIN = 4
"""Number of tokens that are decoded before the longest possible match. (Tokenizers decode the first
token of a string differently.)"""


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion in progress: its tokens and its pages of the cache."""

    rank: Rank
    request: GenerationRequest
    key: int
    limit: int
    """Maximum number of tokens, including the prompt."""
    tokens: list[int] = field(init=False)
    """Token ids of the prompt and of the sampled tokens that the host has read."""
    sampling_key: SamplingKey = field(init=False)
    stream: int = field(init=False)
    """Random stream of the completion, for `tensors.ops.sampling.stream_uniform`."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the sampled tokens."""
    versions: list[str] = field(default_factory=list)
    masks: SampledMasks = field(default_factory=SampledMasks)
    """Sampling masks of the sampled tokens, if the request records masks."""
    experts: Array | None = None
    """Experts of all tokens, set when the sequence ends, if the request records experts."""
    finish: Finish | None = None
    followers: list[Sequence] = field(default_factory=list)
    """Sequences of the same prompt, which begin after the prompt was prefilled."""
    pages: list[int] = field(default_factory=list)
    row: int | None = None
    """Number of the sequence's row in the batch; None while the sequence waits."""
    stored: int = 0
    """Number of leading tokens whose keys and values are in the cache after the next call."""
    shared: int = 0
    """Number of leading pages whose content the pool knows."""
    in_table: int = 0
    """Number of leading pages that are in the batch's table."""
    unread: int = 0
    """Number of sampled tokens that the host has not read from the device."""

    def __post_init__(self) -> None:
        request, options = self.request, self.request.options
        self.tokens = list(request.prompt)
        self.sampling_key = (
            *(options.temperature, options.top_k, options.top_p),
            *(options.greedy, options.masks),
        )
        self.stream = stream(request.seed, request.step, self.key)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def ahead(self) -> int:
        """Number of tokens to process before the next token is sampled; 0 at the limit."""
        return 0 if self.length >= self.limit else self.length - self.stored

    @property
    def sampled(self) -> int:
        """Number of sampled tokens, including unread tokens."""
        return self.length - len(self.request.prompt)

    @property
    def banned(self) -> tuple[int, ...]:
        """The stop tokens that must not be sampled next."""
        options = self.request.options
        return options.stop_token_ids if self.sampled < options.min_new_tokens else ()

    def take(
        self, token: int, logprob: float, version: str, mask: list[int], decode: Decode | None
    ) -> None:
        """Add a token that the weights ``version`` sampled, and end the sequence if it is complete.

        ``mask`` is the token's sampling mask. ``decode`` is needed for stop strings.
        """
        options = self.request.options
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if options.masks:
            self.masks.add(mask)
        if token in options.stop_token_ids or (options.stop_strings and self._stopped(decode)):
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"

    def _stopped(self, decode: Decode | None) -> bool:
        """Return whether the last token completes a stop string."""
        options = self.request.options
        assert decode is not None, "stop strings need a tokenizer"
        if len(self.logprobs) <= options.min_new_tokens:
            return False
        new = self.tokens[len(self.request.prompt) :]
        return ends_with_stop(decode, new, options.stop_strings)

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            tokens=tuple(self.tokens[len(self.request.prompt) :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish,
            masks=self.masks if self.request.options.masks else None,
            experts=self.experts,
        )


def sequences_of(
    request: GenerationRequest, limit: int, arrivals: Iterator[int], decode: Decode | None
) -> list[Sequence]:
    """Return a sequence of at most ``limit`` tokens for each key of a request.

    Raises UsageError if the request has stop strings, but ``decode`` is None.
    """
    if request.options.stop_strings and decode is None:
        raise UsageError(
            f"request {request.request_id} has stop strings, but the engine has no tokenizer"
        )
    return [
        Sequence((request.priority, next(arrivals)), request, key, limit) for key in request.keys
    ]


def ends_with_stop(decode: Decode, tokens: list[int], stop_strings: tuple[str, ...]) -> bool:
    """Return whether the last of a completion's ``tokens`` completes one of ``stop_strings``.

    A stop string may begin and end within tokens. A token has at least one byte, so a stop string
    spans at most as many tokens as it has bytes.
    """
    last = tokens[-max(len(stop.encode()) for stop in stop_strings) - MARGIN :]
    text = decode(last)
    found = [stop for stop in stop_strings if stop in text]
    if not found:
        return False
    known = len(os.path.commonprefix((text, decode(last[:-1]))))  # noqa: RUF071 - as for any strings
    return any(stop in text[max(known - len(stop) + 1, 0) :] for stop in found)
