"""Batched generation by any decoder. T packed tokens, P prompts, S sequences, V vocabulary."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from slurmrl.data.support import SampledSupport
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.base import DecodeSession, PackedModel
from slurmrl.models.packed import packed_positions, packed_rows
from slurmrl.tensors.layout import Array
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.sampling import NONE, keyed_uniform, sample

KEEP_FRACTION = 0.75
"""Finished rows leave the batch once no more than this part of it is unfinished."""
CHECK_TOKENS = {"cpu": 1, "cuda": 8}
"""Tokens, by type of device, between two checks of which rows have ended. Each makes the host wait
for a GPU. Rows that end in between draw further tokens, which are cut."""
Compare = Callable[[int, int], None]
"""Compares what the ranks of a split model have drawn: the number of tokens, and a checksum of
them. Raises an error if they differ; collective."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of generation."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Stop tokens are not drawn before this many new tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion after ``min_new_tokens``. The token that completes one is kept.
    Request engines support them, `generate` does not."""
    support: bool = False
    """Record the tokens that each token was drawn from: those that ``top_k`` and ``top_p`` left.
    Log-probabilities are under these then, also where they would be of all tokens."""
    experts: bool = False
    """Record the experts that each token was read by. Request engines do, `generate` does not."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be at most max"),
            (self.temperature > 0, "temperature must be above 0 (use greedy for the most likely)"),
            (0 < self.top_p <= 1, "top_p must be above 0 and at most 1"),
            (self.top_k is None or self.top_k >= 1, "top_k must be at least 1"),
            (all(self.stop_strings), "stop_strings must not be empty texts"),
            (
                not self.support or (self.top_k is not None and not self.greedy),
                "support needs top_k, which bounds it, and draws that are not greedy",
            ),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise UsageError(f"{self}: " + "; ".join(broken))


@dataclass(frozen=True)
class GenerationOutput:
    """Prompts with their continuations, in the prompts' order; those of one prompt side by side."""

    tokens: Tensor
    """[T] packed: each prompt followed by its new tokens, a stop token included."""
    lengths: Tensor
    """[S] int64, prompt and new tokens; in host memory."""
    prompt_lengths: Tensor
    """[S] int64; in host memory."""
    logprobs: Tensor
    """[T] log p(x_t | x_<t) at the sampling temperature; 0 on prompt tokens;
    float64 where the model is, else float32."""
    finished: Tensor
    """[S] bool: ended with a stop token or stop string, not at the limit; in host memory."""
    support: SampledSupport | None = None
    """Of all T tokens, if the options ask for it; empty on prompt tokens."""
    experts: list[Array] | None = None
    """Of each sequence, if the options ask for it: int16 [its tokens, experts of all blocks]."""


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
    prefill_tokens: int | None = None,
    compare: Compare | None = None,
) -> GenerationOutput:
    """Continue every prompt until a stop token or ``max_new_tokens``, once for each of its keys.

    input_ids [T] packed prompts, cu_seqlens [P+1] in host memory, keys [S] int64: S/P keys of each
    prompt, side by side. Prompts are read once, ``prefill_tokens`` at a time (default: all at
    once). The draw for a token depends on (seed, step, the row's key, the token's position in its
    sequence) and on the logits only. Parameters must be plain tensors: a sharded engine gathers
    them first. ``compare`` is called before each decision that depends on the tokens drawn.
    """
    if options.stop_strings:
        raise UsageError("this model generates whole batches with stop tokens, not stop strings")
    if options.experts:
        raise UsageError("this model generates whole batches without a record of its experts")
    prompts: list[int] = cu_seqlens.diff().tolist()
    copies = completions_of_each(prompts, keys)
    rows_of_prompts = [length for length in prompts for _ in range(copies)]
    batch = _Batch(rows_of_prompts, keys, options, compare)
    if not prompts:
        return batch.output(input_ids)
    tokens = sum(prompts) if prefill_tokens is None else prefill_tokens
    session = decoder.session(prompts, options.max_new_tokens, tokens)
    logits = session.prompts(input_ids)
    if copies > 1:
        rows, places = upload(_copied(cu_seqlens, copies), input_ids.device)
        session.keep(rows)
        logits, input_ids = logits[rows], input_ids[places]
    while True:
        batch.draw(logits, seed, step, session.lengths)
        if batch.ended(session):
            return batch.output(input_ids)
        logits = session.next(batch.last, batch.alive, batch.longest)


def completions_of_each(prompts: list[int], keys: Tensor) -> int:
    """Continuations of each prompt, of which these are the lengths.

    Raises UsageError for arguments with which no whole batch can be generated.
    """
    copies = len(keys) // max(len(prompts), 1)
    if copies * len(prompts) != len(keys) or (prompts and not copies):
        raise UsageError(
            f"{len(keys)} keys for {len(prompts)} prompts: expected 1 or more keys for each"
        )
    if prompts and min(prompts) < 1:
        raise UsageError("an empty prompt cannot be continued")
    return copies


def _copied(cu_seqlens: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """The rows [S] and the tokens of prompts, each prompt ``copies`` times."""
    lengths = cu_seqlens.diff().long()
    rows = torch.arange(len(lengths)).repeat_interleave(copies)
    cu_copied = torch.cat([lengths.new_zeros(1), lengths[rows].cumsum(0)])
    tokens = int(cu_copied[-1])
    begins = cu_seqlens[:-1].long()[rows[packed_rows(cu_copied, tokens)]]
    return rows, begins + packed_positions(cu_copied, tokens)


@dataclass(frozen=True)
class _Drawn:
    """The tokens that the rows of the batch drew between two checks."""

    rows: list[int]
    first: int
    """Tokens that each row had drawn before."""
    tokens: Tensor
    """[N, rows]; a row's tokens after its last one do not count."""
    logprobs: Tensor
    support: Tensor | None
    """[N, rows, K], as `Sampled`."""


class _Batch:
    """The rows that still generate, and the tokens that all rows have drawn so far.

    Every unfinished row has drawn the same number of tokens. The host reads every CHECK_TOKENS
    tokens which rows have ended.
    """

    def __init__(
        self,
        prompts: list[int],
        keys: Tensor,
        options: GenerationOptions,
        compare: Compare | None,
    ) -> None:
        self._prompts, self._keys, self._options = prompts, keys, options
        self._compare, self._checksum = compare, 0
        self._rows = list(range(len(prompts)))
        """The rows in the batch."""
        self._new = [0] * len(prompts)
        self._finished = [False] * len(prompts)
        """Of all rows, as of the last check, as ``_new`` is."""
        stops = torch.tensor(options.stop_token_ids, dtype=torch.int64)
        (self._stops,) = upload([stops], keys.device)
        self._count = 0
        """Tokens that each unfinished row has drawn."""
        self._drawn: list[_Drawn] = []
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._supports: list[Tensor] = []
        """Drawn since the last check."""
        self._finite = torch.ones((), dtype=torch.bool, device=keys.device)
        self._counts = torch.zeros(len(prompts), dtype=torch.int64, device=keys.device)
        """Tokens that each row in the batch has drawn, up to its stop token."""
        self.alive = torch.ones_like(self._counts, dtype=torch.bool)
        """Of the rows in the batch: no stop token drawn yet."""
        self.last = self._counts
        """The token that each row in the batch drew last."""
        self._longest_open, self._longest_ended = max(prompts, default=0), 0
        """Tokens of the longest prompt of rows that were alive at the last check; of the longest
        row in the batch that was not."""

    @property
    def longest(self) -> int:
        """Upper bound of the tokens of a row in the batch, those drawn last included."""
        return max(self._longest_open + self._count, self._longest_ended)

    def draw(self, logits: Tensor, seed: int, step: int, positions: Tensor) -> None:
        """Draw a token for every row in the batch from logits [S, V]."""
        options = self._options
        tokens, logprobs, support = sample(
            logits,
            keyed_uniform(seed, step, self._keys, positions),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            greedy=options.greedy,
            banned=self._stops if self._count < options.min_new_tokens else None,
            support=options.support,
            record=options.support,
        )
        self._count += 1
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        if support is not None:
            self._supports.append(support)
        self._finite = self._finite & torch.isfinite(logprobs).all()
        self._counts = self._counts + self.alive
        self.alive = self.alive & ~torch.isin(tokens, self._stops)
        self.last = tokens

    def ended(self, session: DecodeSession) -> bool:
        """Whether all rows have ended, as far as the host knows. Removes ended rows from the batch
        once there are enough of them to pay for the copy.

        Raises RunFailedError if logits were not finite.
        """
        limit = self._count == self._options.max_new_tokens
        if not limit and self._count % CHECK_TOKENS[self._keys.device.type]:
            return False
        left = self._check()
        if limit or not left:
            return True
        if len(left) <= KEEP_FRACTION * len(self._rows):
            self._keep(left, session)
        return False

    def _check(self) -> list[int]:
        """Read which rows of the batch are alive; return their indices in it."""
        rows, drawn = len(self._rows), torch.stack(self._tokens)
        state = [self.alive.long(), self._counts, self._finite.long()[None]]
        if self._compare is not None:
            state.append(drawn.flatten())
        values = torch.cat(state).tolist()
        if self._compare is not None:
            self._checksum = crc32(array("q", values), self._checksum)
            self._compare(sum(values[rows : 2 * rows]), self._checksum)
        alive, counts, finite = values[:rows], values[rows : 2 * rows], values[2 * rows]
        if not finite:
            raise RunFailedError("the model's logits are not finite: its weights have diverged")
        for row, unfinished, count in zip(self._rows, alive, counts, strict=True):
            self._new[row], self._finished[row] = count, not unfinished
        first = self._count - len(self._tokens)
        logprobs = torch.stack(self._logprobs)
        support = torch.stack(self._supports) if self._supports else None
        self._drawn.append(_Drawn(self._rows, first, drawn, logprobs, support))
        self._tokens, self._logprobs, self._supports = [], [], []
        self._find_longest()
        return [place for place, unfinished in enumerate(alive) if unfinished]

    def _find_longest(self) -> None:
        prompts, ended = self._prompts, self._finished
        self._longest_open = max((prompts[row] for row in self._rows if not ended[row]), default=0)
        lengths = (prompts[row] + self._new[row] for row in self._rows if ended[row])
        self._longest_ended = max(lengths, default=0)

    def _keep(self, left: list[int], session: DecodeSession) -> None:
        """Remove all rows of the batch but these."""
        self._rows = [self._rows[place] for place in left]
        self._find_longest()
        (index,) = upload([torch.tensor(left)], self._keys.device)
        session.keep(index)
        self._keys, self.last = self._keys[index], self.last[index]
        self.alive, self._counts = self.alive[index], self._counts[index]

    def output(self, input_ids: Tensor) -> GenerationOutput:
        """Prompts [T] and the tokens drawn, packed."""
        prompts, new = (torch.tensor(x, dtype=torch.int64) for x in (self._prompts, self._new))
        lengths = prompts + new
        (source,) = upload([self._sources(prompts, new)], input_ids.device)
        drawn = self._drawn
        tokens = torch.cat([input_ids, *(part.tokens.flatten() for part in drawn)])
        dtype = drawn[0].logprobs.dtype if drawn else torch.float32
        none = torch.zeros(input_ids.shape[0], dtype=dtype, device=input_ids.device)
        logprobs = torch.cat([none, *(part.logprobs.flatten() for part in drawn)])
        finished = torch.tensor(self._finished, dtype=torch.bool)
        support = self._support(input_ids, source) if self._options.support else None
        return GenerationOutput(
            tokens[source], lengths, prompts, logprobs[source], finished, support
        )

    def _support(self, input_ids: Tensor, source: Tensor) -> SampledSupport:
        """That of the output's tokens, which come from ``source``."""
        width = self._options.top_k or 0
        none = torch.full((input_ids.shape[0], width), NONE, device=source.device)
        drawn = [part.support.flatten(0, 1) for part in self._drawn if part.support is not None]
        rows = torch.cat([none.to(torch.int32), *drawn])[source]
        kept = rows != NONE
        both = (kept.sum(-1, dtype=torch.int32), rows[kept])
        return SampledSupport(*(array("i", each.cpu().numpy().tobytes()) for each in both))

    def _sources(self, prompts: Tensor, new: Tensor) -> Tensor:
        """Index of each token of the output in the prompts' tokens followed by all drawn tokens."""
        lengths, total = prompts + new, int(prompts.sum())
        starts = lengths.cumsum(0) - lengths
        before = starts - (prompts.cumsum(0) - prompts)
        places = [torch.arange(total) + torch.repeat_interleave(before, prompts)]
        real = [torch.ones(total, dtype=torch.bool)]
        for part in self._drawn:
            number = torch.arange(len(part.tokens))[:, None] + part.first
            places.append((starts + prompts)[part.rows] + number)
            real.append(number < new[part.rows])
        counted = torch.cat([part.flatten() for part in real])
        places_of_counted = torch.cat([part.flatten() for part in places])[counted]
        sources = torch.arange(counted.shape[0])[counted]
        return torch.empty_like(sources).scatter_(0, places_of_counted, sources)
