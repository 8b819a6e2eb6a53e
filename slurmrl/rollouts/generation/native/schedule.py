"""Which tokens the next call of the model reads: continuous batching with a token budget.

Everything here is a pure function of the requests and of the tokens drawn, so tensor ranks that
get the same requests decide alike.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from slurmrl.errors import UsageError
from slurmrl.plan.estimates.memory import PAGE_TOKENS
from slurmrl.rollouts.generation.native.pages import PagePool
from slurmrl.rollouts.generation.native.sequence import Rank, Sequence


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The size of a batch."""

    rows: int = 256
    """Most sequences that are served at a time."""
    step_tokens: int = 2048
    """Most tokens that one call of the model reads: one of each row that draws, and parts of
    prompts."""
    cache_tokens: int | None = None
    """Tokens of keys and values that are kept. Default: as many as fit into ``cache_bytes``."""
    cache_bytes: int | None = None
    """Memory for them. Default: on a GPU most of what is free when the engine is made, elsewhere
    what the rows need."""
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        rules = (
            (self.rows >= 1, "rows must be at least 1"),
            (self.step_tokens >= self.rows, "step_tokens must be at least rows"),
            (self.page_tokens >= 1, "page_tokens must be at least 1"),
            (
                self.cache_tokens is None or self.cache_tokens >= self.page_tokens,
                "cache_tokens must be at least page_tokens",
            ),
            (
                self.cache_tokens is None or self.cache_bytes is None,
                "give cache_tokens or cache_bytes, not both",
            ),
        )
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise UsageError(f"{self}: " + "; ".join(broken))

    @property
    def pages(self) -> int | None:
        return None if self.cache_tokens is None else self.cache_tokens // self.page_tokens


class Reading(NamedTuple):
    """Tokens of a sequence that a call reads: ``tokens`` behind the first ``begin``."""

    sequence: Sequence
    begin: int
    tokens: int
    draws: bool
    """Whether it ends with the last token, so that the next one is drawn."""


@dataclass
class Step:
    """One call of the model."""

    readings: list[Reading] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    """Sequences that draw their first token behind the prompt of another one, which is read."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy after the call: source and target."""


class Schedule:
    """The sequences that wait and those that run."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self._limits, self._pool = limits, pool
        self._waiting: list[tuple[Rank, Sequence]] = []
        self.running: list[Sequence] = []
        """In the order of service."""
        self._rows = list(range(limits.rows - 1, -1, -1))

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        heappush(self._waiting, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Serve it no more."""
        if sequence.row is None:
            kept = [entry for entry in self._waiting if entry[1] is not sequence]
            if len(kept) < len(self._waiting):
                self._waiting = sorted(kept)
        else:
            self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free its row and pages; it waits until its tokens can be read again."""
        self._release(sequence)
        self.add(sequence)

    def next(self, settle: Callable[[], None]) -> Step:
        """Choose what to read next.

        Tokens and pages count as stored from now on. ``settle`` reads all tokens that were drawn;
        sequences can be preempted only then.
        """
        step = Step()
        budget = self._limits.step_tokens
        pending = [(ahead, sequence) for sequence in self.running if (ahead := sequence.ahead)]
        pending.sort(key=lambda pair: pair[0] > 1)  # those that draw first
        for ahead, sequence in pending:
            count = min(ahead, budget)
            if not count:
                break
            # (one that was preempted for an earlier one has no row)
            tokens = sequence.stored + count
            if sequence.row is not None and self._reserve(sequence, tokens, settle):
                self._read(sequence, count, step)
                budget -= count
        while budget and self._waiting and self._rows:
            sequence = self._waiting[0][1]
            if not self._admit(sequence, settle):
                break
            count = min(sequence.ahead, budget)
            self._read(sequence, count, step)
            budget -= count
        step.readings = [reading for reading in step.readings if reading.sequence.row is not None]
        return step

    def store(self, sequence: Sequence) -> None:
        """Let others share the pages that are full of tokens that the host knows."""
        page = self._pool.page
        full = min(sequence.stored, len(sequence.tokens)) // page
        for place in range(sequence.shared, full):
            before = sequence.pages[place - 1] if place else None
            tokens = tuple(sequence.tokens[place * page : (place + 1) * page])
            self._pool.store(sequence.pages[place], before, tokens)
        sequence.shared = max(sequence.shared, full)

    def seclude(self) -> None:
        """No page of those that run is stored from now on.

        (Without its first page, which may not be full yet, the pool stores none of a sequence.)
        """
        for sequence in self.running:
            sequence.shared = max(sequence.shared, 1)

    def _read(self, sequence: Sequence, count: int, step: Step) -> None:
        begin, draws = sequence.stored, count == sequence.ahead
        step.readings.append(Reading(sequence, begin, count, draws))
        sequence.stored += count
        self.store(sequence)  # a call stores all keys before it attends to any
        if draws:
            for follower in sequence.followers:
                self._fork(sequence, follower, step)
            sequence.followers = []

    def _fork(self, leader: Sequence, follower: Sequence, step: Step) -> None:
        """Begin a completion of the prompt that a call reads, or let it wait."""
        rest = leader.stored % self._pool.page
        if not self._rows or self._pool.available() <= len(self.running) + 1:
            self.add(follower)
            return
        whole = leader.stored // self._pool.page
        follower.pages = leader.pages[:whole]
        for page in follower.pages:
            self._pool.share(page)
        if rest:
            follower.pages.append(self._pool.take())
            step.copies.append((leader.pages[whole], follower.pages[whole]))
        follower.stored, follower.shared = leader.stored, leader.shared
        step.forks.append((leader, follower))
        self._start(follower)

    def _admit(self, sequence: Sequence, settle: Callable[[], None]) -> bool:
        """Give the first waiting sequence a row and the pages for all of its tokens.

        Return False unless there are enough pages, and another one for every other row.
        """
        shared = self._pool.find(sequence.tokens)
        needed = self._pages(sequence.length) - len(shared) + self._pool.idle_among(shared)
        if self.running and self._pool.available() < needed + len(self.running):
            return False
        heappop(self._waiting)
        for page in shared:
            self._pool.share(page)
        sequence.pages = shared
        sequence.stored, sequence.shared = len(shared) * self._pool.page, len(shared)
        self._start(sequence)
        reserved = self._reserve(sequence, sequence.length, settle)
        assert reserved, "the pages were counted"
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.row = self._rows.pop()
        insort(self.running, sequence, key=lambda other: other.rank)

    def _reserve(self, sequence: Sequence, tokens: int, settle: Callable[[], None]) -> bool:
        """Give a sequence the pages for this many tokens.

        If no pages are free, take the pages of the sequence that is last in the order of service.
        Return False if that is this sequence, which is then preempted, or if this sequence has
        ended.
        """
        while len(sequence.pages) < self._pages(tokens):
            if self._pool.available():
                sequence.pages.append(self._pool.take())
                continue
            settle()
            if sequence.row is None:
                return False  # it has ended
            if self._pool.available():
                continue
            last = self.running[-1]
            self.preempt(last)
            if last is sequence:
                return False
        return True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._pool.page)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        assert not sequence.unread or sequence.finish, "its tokens would be lost"
        self._rows.append(sequence.row)
        self.running.remove(sequence)
        self._pool.release(sequence.pages)
        sequence.pages, sequence.row = [], None
        sequence.stored = sequence.shared = sequence.tabled = 0
