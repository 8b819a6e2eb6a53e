"""Batched generation by any decoder. T packed tokens, S sequences, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.base import DecodeSession, PackedModel
from slurmrl.ops.sampling import keyed_uniform, sample

KEEP_FRACTION = 0.75
"""Finished rows leave the batch once no more than this part of it is unfinished."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to continue prompts."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens are not drawn before this many new tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be at most max"),
            (self.temperature > 0, "temperature must be above 0 (use greedy for the most likely)"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k is None or self.top_k >= 1, "top_k must be at least 1"),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise UsageError(f"{self}: " + "; ".join(broken))


@dataclass(frozen=True)
class GenerationOutput:
    """Prompts with their continuations, in the prompts' order."""

    tokens: Tensor
    """[T] packed: each prompt followed by its new tokens, a stop token included."""
    lengths: Tensor
    """[S] int64, prompt and new tokens."""
    prompt_lengths: Tensor
    """[S] int64."""
    logprobs: Tensor
    """[T] log p(x_t | x_<t) at the sampling temperature; 0 on prompt tokens;
    float64 where the model is, else float32."""
    finished: Tensor
    """[S] bool: ended with a stop token rather than at the limit."""


@torch.no_grad()
def generate(
    decoder: PackedModel,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    options: GenerationOptions,
    *,
    seed: int,
    step: int,
    keys: Tensor,
) -> GenerationOutput:
    """Continue every prompt until a stop token or ``max_new_tokens``.

    input_ids [T] packed prompts, cu_seqlens [S+1], keys [S] int64. The draw for a token depends
    on (seed, step, the row's key, the token's position in its sequence) and on the logits only.
    Parameters must be plain tensors: a sharded engine gathers them first.
    """
    cu_seqlens = cu_seqlens.to(input_ids.device)
    lengths = cu_seqlens.diff().long()
    batch = _Batch(lengths, keys, options)
    if not lengths.numel():
        return batch.output(input_ids)
    if int(lengths.min()) < 1:
        raise UsageError("an empty prompt cannot be continued")
    session = decoder.session(lengths, options.max_new_tokens)
    logits = session.prompts(input_ids, cu_seqlens)
    while True:
        batch.draw(logits, seed, step, session.lengths)
        if not batch.alive.any():
            return batch.output(input_ids)
        batch.compact(session)
        logits = session.next(batch.last, batch.alive)


class _Batch:
    """Which rows still generate, and what all rows have drawn so far.

    Every unfinished row has drawn the same number of tokens.
    """

    def __init__(self, prompt_lengths: Tensor, keys: Tensor, options: GenerationOptions) -> None:
        self._prompt_lengths, self._keys, self._options = prompt_lengths, keys, options
        self._rows = torch.arange(prompt_lengths.shape[0], device=prompt_lengths.device)
        self._stops = torch.tensor(options.stop_token_ids, device=keys.device, dtype=torch.int64)
        self._finished = torch.zeros_like(prompt_lengths, dtype=torch.bool)
        self._drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        self.alive = torch.ones_like(self._finished)
        """Of the rows in the batch: still generating."""
        self.last = self._rows
        """The token that each row in the batch drew last."""

    def draw(self, logits: Tensor, seed: int, step: int, positions: Tensor) -> None:
        """One more token for every row in the batch, from logits [S, V].

        Raises RunFailedError where logits are not finite.
        """
        options, alive = self._options, self.alive
        count = len(self._drawn)
        tokens, logprobs = sample(
            logits,
            keyed_uniform(seed, step, self._keys, positions),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            greedy=options.greedy,
            banned=options.stop_token_ids if count < options.min_new_tokens else (),
        )
        if not torch.isfinite(logprobs).all():
            raise RunFailedError("the model's logits are not finite: its weights have diverged")
        self._drawn.append((self._rows[alive], tokens[alive], logprobs[alive]))
        stopped = torch.isin(tokens, self._stops) & alive
        self._finished[self._rows[stopped]] = True
        limit = count + 1 == options.max_new_tokens
        self.alive = torch.zeros_like(alive) if limit else alive & ~stopped
        self.last = tokens

    def compact(self, session: DecodeSession) -> None:
        """Take ended rows out of the batch once there are enough of them to pay for the copy."""
        left = self.alive.nonzero().squeeze(-1)
        if left.shape[0] > KEEP_FRACTION * self.alive.shape[0]:
            return
        session.keep(left)
        self._rows, self._keys, self.last = self._rows[left], self._keys[left], self.last[left]
        self.alive = self.alive[left]

    def output(self, input_ids: Tensor) -> GenerationOutput:
        """Prompts [T] and what was drawn, packed."""
        prompts = self._prompt_lengths
        lengths = prompts.clone()
        for rows, _, _ in self._drawn:
            lengths[rows] += 1
        total = int(lengths.sum())
        starts = lengths.cumsum(0) - lengths
        tokens = input_ids.new_empty(total)
        dtype = self._drawn[0][2].dtype if self._drawn else torch.float32
        logprobs = torch.zeros(total, dtype=dtype, device=input_ids.device)
        shift = starts - (prompts.cumsum(0) - prompts)
        spread = torch.repeat_interleave(shift, prompts, output_size=input_ids.shape[0])
        tokens[spread + torch.arange(input_ids.shape[0], device=input_ids.device)] = input_ids
        for count, (rows, new_tokens, new_logprobs) in enumerate(self._drawn):
            places = starts[rows] + prompts[rows] + count
            tokens[places] = new_tokens
            logprobs[places] = new_logprobs
        return GenerationOutput(tokens, lengths, prompts, logprobs, self._finished)
