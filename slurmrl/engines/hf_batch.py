"""Generation of completions with a model of transformers, in one batch.

Rows join and leave the batch between checks.

S is the number of rows in the batch, V the size of the vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

import torch
from torch import Tensor

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.experts import UNKNOWN
from slurmrl.rollouts.generation.base import Decode, GenerationRequest
from slurmrl.rollouts.generation.native.native_rollout import SplitRollout
from slurmrl.rollouts.generation.native.sequence import Sequence, sequences_of
from slurmrl.rollouts.generation.native.split_batch import SplitRanks
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.sampling import NONE, Sampled, joined, sample, stream_uniform

if TYPE_CHECKING:
    from slurmrl.models.hf_model import HFModel
    from slurmrl.models.hf_session import HFSession


KEEP_FRACTION: Final = 0.75
"""Ended rows leave the batch when at most this fraction of its rows is unfinished."""
CHECK_TOKENS: Final = {"cpu": 1, "cuda": 8}
"""Mapping from device type to the number of tokens per row between two checks for ended rows. A
check makes the host wait for the GPU. Tokens that a row samples after its end are discarded."""
WIDEST: Final = 2
"""Maximum ratio of a cache's columns to the tokens of its longest row. The cache is computed again
if joining rows would exceed the ratio, because the other columns are padding."""


class HFBatch:
    """Rows that share a cache. The cache lacks the last sampled token of each unfinished row."""

    def __init__(
        self,
        model: HFModel,
        prefill_tokens: int,
        decode: Decode | None,
        *,
        masked: bool,
        most_rows: int | None,
        joins: bool,
    ) -> None:
        """Make an empty batch of at most ``most_rows`` unfinished rows (None: no limit).

        Without ``joins``, rows wait until all other rows have ended. ``prefill_tokens``: see
        `HFModel.session`; ``masked``: see `ServingOptions`.
        """
        self._model, self._prefill_tokens = model, prefill_tokens
        self._most_rows, self._joins = most_rows, joins
        self._waiting: list[Sequence] = []
        self._arrivals = count()
        self._version = ""
        """Name of the weight version that samples tokens."""
        self.sampled = 0
        """Total number of sampled tokens."""
        self.checksum = 0
        """CRC-32 of all sampled tokens, in their order."""
        self._decode, self._masked = decode, masked
        self._device = next(model.inner.parameters()).device
        self._experts = False
        """Whether experts are recorded, because a request has asked for them."""
        self._rows: list[Sequence] = []
        self._session: HFSession | None = None
        """The cache of ``_rows``; None if it must be computed again."""
        self._unread: list[tuple[list[Sequence], Sampled]] = []
        """Samples since the last check, each with its rows."""
        self._living = 0
        """Number of unfinished rows when the following tensors were made."""
        self._streams = self._limits = self._last = torch.zeros(0, dtype=torch.int64)
        """[S]: random streams, maximum lengths of sequences, and last sampled tokens."""
        self._stops = torch.zeros((0, 0), dtype=torch.int64)
        """[S, stop tokens of a row], padded with `NONE`."""
        self._alive = torch.zeros(0, dtype=torch.bool)

    @property
    def living(self) -> int:
        """Number of unfinished rows."""
        return sum(row.finish is None for row in self._rows)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self.living > 0

    def add(self, request: GenerationRequest) -> list[Sequence]:
        """Queue a request; return its completions, one for each key.

        Raises UsageError for a request that can never be served.
        """
        name, options = f"request {request.request_id}", request.options
        if not request.prompt:
            raise UsageError(f"{name}: an empty prompt cannot be continued")
        limit = len(request.prompt) + options.max_new_tokens
        rows = sequences_of(request, limit, self._arrivals, self._decode)
        if options.experts and not self._model.routers.blocks:
            raise UsageError(f"{name}: the model has no experts to record")
        self._model.check_length(limit)
        self._waiting += rows
        return rows

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences that have not ended; they keep their tokens."""
        for row in sequences:
            row.finish = row.finish or "aborted"
        self._waiting = [row for row in self._waiting if row.finish is None]

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        """Continue with changed weights. Compute the cache again unless ``stale_cache`` is true."""
        self._version = version
        if not stale_cache:
            self._session = None

    def step(self) -> list[Sequence]:
        """Let rows join, and sample some tokens of each row. Return the rows that have ended.

        Raises RunFailedError if logits are not finite.
        """
        living = self.living
        if self._waiting and (self._joins or not living):
            self._waiting.sort(key=lambda row: (row.rank[0], row.request.request_id))
            free = len(self._waiting) if self._most_rows is None else self._most_rows - living
            if free > 0:
                rows, self._waiting = self._waiting[:free], self._waiting[free:]
                self._join(rows)
        return self._advance()

    @torch.no_grad()
    def _join(self, rows: Items[Sequence]) -> None:
        """Prefill the prompts of rows, and sample their first tokens."""
        self._remove_ended(fraction=1.0)
        if not self._experts and any(row.request.options.experts for row in rows):
            self._experts, self._session = True, None
        known = len(self._rows)
        self._rows = [*self._rows, *rows]
        width = 0 if self._session is None else self._session.width
        longest = [max(len(row.tokens) for row in each) for each in (rows, self._rows)]
        if self._session is None or not longest[0] <= width <= WIDEST * longest[1]:
            self._session = None
            self._session, logits = self._read(self._rows)
            logits = logits[known:]
        else:
            session, logits = self._read(rows, width)
            self._session.join(session)
        self._set_tensors()
        self._sample(logits, self._session, known)

    @torch.no_grad()
    def _advance(self) -> list[Sequence]:
        """Sample a few tokens of each row. Return the rows that have ended.

        The sample of a token depends only on (seed, step, the row's key, the token's position in
        its sequence) and on the logits.
        """
        self._remove_ended(fraction=KEEP_FRACTION)
        for _ in range(len(self._unread), CHECK_TOKENS[self._device.type]):
            if not any(row.finish is None and row.length < row.limit for row in self._rows):
                break
            if self._session is not None and self._session.full:
                if self._unread:
                    break  # A new session needs tokens that the host does not know yet.
                self._session = None
            if self._session is None:
                self._session, _ = self._read(self._rows)
            self._sample(self._session.next(self._last, self._alive), self._session)
        return self._check()

    def _remove_ended(self, *, fraction: float) -> None:
        """Update the tensors if rows have ended.

        If at most a ``fraction`` of the rows is unfinished, remove ended rows, which copies the
        cache.
        """
        left = [place for place, row in enumerate(self._rows) if row.finish is None]
        if len(left) == self._living and fraction < 1.0:
            return
        if len(left) < len(self._rows) and len(left) <= fraction * len(self._rows):
            self._rows = [self._rows[place] for place in left]
            if self._session is not None and left:
                self._session.keep(upload([torch.tensor(left)], self._device)[0])
        if not left:
            self._session = None
        self._set_tensors()

    def _set_tensors(self) -> None:
        """Make the tensors of the rows from the host's values."""
        rows = self._rows
        self._living = self.living
        widest = max((len(row.request.options.stop_token_ids) for row in rows), default=0)
        stops = torch.full((len(rows), widest), NONE)
        for place, row in enumerate(rows):
            ids = row.request.options.stop_token_ids
            stops[place, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        columns = [(row.stream, row.limit, row.tokens[-1], row.finish is None) for row in rows]
        values = torch.tensor(columns, dtype=torch.int64).view(len(rows), 4).t().contiguous()
        stops, values = upload([stops, values], self._device)
        self._stops, (self._streams, self._limits, self._last, alive) = stops, values
        self._alive = alive.bool()

    def _read(self, rows: Items[Sequence], width: int = 0) -> tuple[HFSession, Tensor]:
        """Return a session that has prefilled rows, and the logits [S, V] after these tokens.

        For a new row, prefill the prompt; for other rows, prefill all tokens except the last. Rows
        with equal tokens and pictures are prefilled once. ``width``: see `HFModel.session`.
        """
        texts: dict[tuple[str, tuple[int, ...]], int] = {}
        order = [
            texts.setdefault(
                (row.request.pictures, tuple(row.tokens[:-1] if row.logprobs else row.tokens)),
                len(texts),
            )
            for row in rows
        ]
        session = self._model.session(
            [len(text) for _, text in texts],
            self._prefill_tokens,
            width,
            experts=self._experts,
            pictures=[pictures for pictures, _ in texts],
        )
        tokens = torch.tensor([token for _, text in texts for token in text])
        logits = session.prompts(upload([tokens], self._device)[0])
        if order != list(range(len(texts))):
            (index,) = upload([torch.tensor(order)], self._device)
            session.keep(index)
            logits = logits[index]
        return session, logits

    def _sample(self, logits: Tensor, session: HFSession, first: int = 0) -> None:
        """Sample a token for every row from ``first`` on, from their logits [S, V]."""
        rows, lengths = self._rows[first:], session.lengths[first:]
        drawn = self._drawn(rows, logits, stream_uniform(self._streams[first:], lengths))
        self._unread.append((rows, drawn))
        for row in rows:
            row.unread += 1
        stopped = (drawn.tokens[:, None] == self._stops[first:]).any(-1)
        going = self._alive[first:] & ~stopped & (lengths + 1 < self._limits[first:])
        self._alive = torch.cat((self._alive[:first], going))
        self._last = torch.cat((self._last[:first], drawn.tokens))

    def _drawn(self, rows: Items[Sequence], logits: Tensor, uniforms: Tensor) -> Sampled:
        """Sample a token for each row, in one call for all rows with equal options."""
        parts: dict[tuple[object, ...], list[int]] = {}
        for place, row in enumerate(rows):
            parts.setdefault((row.sampling_key, row.banned), []).append(place)
        drawn: list[Sampled] = []
        for places in parts.values():
            row = rows[places[0]]
            temperature, top_k, top_p, greedy, record = row.sampling_key
            own = (logits, uniforms)
            if len(parts) > 1:
                (index,) = upload([torch.tensor(places)], self._device)
                own = (logits[index], uniforms[index])
            (banned,) = upload([torch.tensor(row.banned, dtype=torch.int64)], self._device)
            drawn.append(
                sample(
                    *own,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                    greedy=greedy,
                    banned=banned if row.banned else None,
                    masked=self._masked,
                    record=record,
                )
            )
        if len(drawn) == 1:
            return drawn[0]
        order = torch.tensor([place for places in parts.values() for place in places]).argsort()
        (order,) = upload([order], self._device)
        return joined(drawn).each(lambda values: values[order])

    def _check(self) -> list[Sequence]:
        """Copy all unread samples to the host. Return the rows that have ended."""
        unread, self._unread = self._unread, []
        tensors = [each for _, drawn in unread for each in drawn if each is not None]
        values = iter(torch.cat([each.double().flatten() for each in tensors]).tolist())
        ended: list[Sequence] = []
        for rows, drawn in unread:
            tokens = [int(next(values)) for _ in rows]
            logprobs = [next(values) for _ in rows]
            self.checksum = crc32(array("q", tokens), self.checksum)
            if not all(map(math.isfinite, logprobs)):
                raise RunFailedError("the model's logits are not finite: its weights have diverged")
            width = 0 if drawn.masks is None else drawn.masks.shape[1]
            kept = [[int(next(values)) for _ in range(width)] for _ in rows]
            for row, token, logprob, mask in zip(rows, tokens, logprobs, kept, strict=True):
                row.unread -= 1
                if row.finish is not None:
                    continue
                mask = [each for each in mask if each != NONE]
                row.take(token, logprob, self._version, mask, self._decode)
                self.sampled += 1
                if row.finish is not None:
                    ended.append(row)
        self._record_experts(ended)
        return ended

    def _record_experts(self, ended: Items[Sequence]) -> None:
        """Store the experts of each token in the ended rows whose requests ask for them."""
        wanted = {id(row) for row in ended if row.request.options.experts}
        for place, row in enumerate(self._rows):
            if id(row) in wanted:
                assert self._session is not None, "it has sampled"
                read = self._session.experts(place, len(row.tokens) - 1)
                # The model has not processed the last token.
                last = read.new_full((1, read.shape[1]), UNKNOWN)
                row.experts = torch.cat((read, last)).cpu().numpy()


async def _at_once() -> None:
    await asyncio.sleep(0)


class HFRollout(SplitRollout):
    """Serves requests in rounds, or continuously with ``joins``.

    A round computes the requests that wait at its beginning. With ``joins``, a request joins the
    batch as soon as there is room.
    """

    def __init__(
        self,
        model: HFModel,
        version: str | None,
        prefill_tokens: int,
        *,
        rows: int | None = None,
        decode: Decode | None = None,
        masked: bool = True,
        settled: Callable[[], Awaitable[None]] | None = None,
        joins: bool = False,
        stale_cache: bool = False,
        peers: SplitRanks | None = None,
        turns: bool = True,
    ) -> None:
        """Serve requests with ``model``, at most ``rows`` completions at a time (None: no limit).

        ``version``, ``stale_cache``: see `BatchRollout`. ``decode``, ``masked``, ``settled``: see
        `ServingOptions`. Rounds begin after ``settled`` returns. ``peers``, ``turns``: see
        `SplitRollout`.
        """
        self._model = model
        self._settled = settled or _at_once
        self._own = HFBatch(
            model, prefill_tokens, decode, masked=masked, most_rows=rows, joins=joins
        )
        super().__init__(self._own, version, stale_cache=stale_cache, peers=peers, turns=turns)

    async def _before_step(self) -> None:
        if not self._own.living:
            await self._settled()

    def _read_own(self, folder: Path) -> None:
        from slurmrl.models.hf_reading import read_weights  # transformers takes seconds to import

        read_weights(self._model, folder)

    def _check_own(self) -> None:
        # If the model cannot generate, fail now, before the task asks for prompts.
        self._model.require_generation()
