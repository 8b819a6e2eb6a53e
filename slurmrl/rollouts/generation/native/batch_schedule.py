"""The scheduler, which chooses the tokens of the next model call and their cache pages.

The schedule is continuous batching with a token budget over a paged key-value cache. All decisions
are pure functions of the requests and the sampled tokens, so tensor ranks with the same requests
make the same decisions.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from slurmrl.errors import UsageError
from slurmrl.plan.estimates.memory import PAGE_TOKENS
from slurmrl.rollouts.generation.native.sequence import Rank, Sequence


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a batch."""

    rows: int = 256
    """Maximum number of sequences in progress."""
    step_tokens: int = 2048
    """Maximum number of tokens in one call of the model: one token of each sampling row, and chunks
    of prompts."""
    cache_tokens: int | None = None
    """Number of tokens in the key-value cache. Default: as many as fit into ``cache_bytes``."""
    cache_bytes: int | None = None
    """Bytes of memory for keys and values. Default: on a GPU, most of the memory that is free at
    the start; on a CPU, as much as the rows need."""
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


class TokenChunk(NamedTuple):
    """Tokens of a sequence that a call reads: ``tokens`` follow the first ``begin`` tokens."""

    sequence: Sequence
    begin: int
    tokens: int
    samples: bool
    """Whether the chunk ends with the sequence's last token, so that the next token is sampled."""


@dataclass
class Step:
    """One call of the model."""

    chunks: list[TokenChunk] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    """Pairs (leader, follower): the follower samples its first token after the leader's prompt."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (source, target) of pages to copy after the call."""


class Schedule:
    """The waiting and the running sequences."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self._limits, self._pool = limits, pool
        self._waiting: list[tuple[Rank, Sequence]] = []
        self.running: list[Sequence] = []
        """Sequences with a row, in the order of service."""
        self._rows = list(range(limits.rows - 1, -1, -1))

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        heappush(self._waiting, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or a running sequence."""
        if sequence.row is None:
            kept = [entry for entry in self._waiting if entry[1] is not sequence]
            if len(kept) < len(self._waiting):
                self._waiting = sorted(kept)
        else:
            self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a sequence's row and pages, and queue it for another prefill."""
        self._release(sequence)
        self.add(sequence)

    def next(self, flush: Callable[[], None]) -> Step:
        """Return the next call of the model, whose tokens and pages now count as stored.

        ``flush`` reads all sampled tokens from the device. This is necessary before a preemption.
        """
        step = Step()
        budget = self._limits.step_tokens
        pending = [(ahead, sequence) for sequence in self.running if (ahead := sequence.ahead)]
        pending.sort(key=lambda pair: pair[0] > 1)  # sequences that sample come first
        for ahead, sequence in pending:
            count = min(ahead, budget)
            if not count:
                break
            # Skip a sequence without a row: it was preempted for an earlier sequence.
            tokens = sequence.stored + count
            if sequence.row is not None and self._reserve(sequence, tokens, flush):
                self._read(sequence, count, step)
                budget -= count
        while budget and self._waiting and self._rows:
            sequence = self._waiting[0][1]
            if not self._admit(sequence, flush):
                break
            count = min(sequence.ahead, budget)
            self._read(sequence, count, step)
            budget -= count
        step.chunks = [chunk for chunk in step.chunks if chunk.sequence.row is not None]
        return step

    def store(self, sequence: Sequence) -> None:
        """Let other sequences share the full pages of a sequence whose tokens the host knows."""
        page = self._pool.page
        full = min(sequence.stored, len(sequence.tokens)) // page
        for place in range(sequence.shared, full):
            before = sequence.pages[place - 1] if place else None
            tokens = tuple(sequence.tokens[place * page : (place + 1) * page])
            self._pool.store(sequence.pages[place], before, tokens)
        sequence.shared = max(sequence.shared, full)

    def isolate(self) -> None:
        """Prevent other sequences from sharing pages of the running sequences.

        The pool stores the pages of a sequence in order. If the first page counts as shared but is
        not stored, the pool therefore stores no page of the sequence.
        """
        for sequence in self.running:
            sequence.shared = max(sequence.shared, 1)

    def _read(self, sequence: Sequence, count: int, step: Step) -> None:
        begin, samples = sequence.stored, count == sequence.ahead
        step.chunks.append(TokenChunk(sequence, begin, count, samples))
        sequence.stored += count
        self.store(sequence)  # a call stores all keys before attention reads any
        if samples:
            for follower in sequence.followers:
                self._fork(sequence, follower, step)
            sequence.followers = []

    def _fork(self, leader: Sequence, follower: Sequence, step: Step) -> None:
        """Start a follower with its leader's prompt; queue it if there is no free row or page."""
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

    def _admit(self, sequence: Sequence, flush: Callable[[], None]) -> bool:
        """Give the first waiting sequence a row and the pages for all its tokens.

        Return False unless these pages and one more page for each running sequence are available.
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
        reserved = self._reserve(sequence, sequence.length, flush)
        assert reserved, "the free pages were counted before"
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.row = self._rows.pop()
        insort(self.running, sequence, key=lambda other: other.rank)

    def _reserve(self, sequence: Sequence, tokens: int, flush: Callable[[], None]) -> bool:
        """Give a sequence the pages for its first ``tokens`` tokens.

        If no page is available, preempt the sequence that is last in the order of service. Return
        False if this sequence itself was preempted or has ended.
        """
        while len(sequence.pages) < self._pages(tokens):
            if self._pool.available():
                sequence.pages.append(self._pool.take())
                continue
            flush()
            if sequence.row is None:
                return False  # the sequence has ended
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
        assert not sequence.unread or sequence.finish, "unread tokens would be lost"
        self._rows.append(sequence.row)
        self.running.remove(sequence)
        self._pool.release(sequence.pages)
        sequence.pages, sequence.row = [], None
        sequence.stored = sequence.shared = sequence.in_table = 0


Prefix = tuple[int, tuple[int, ...]]
"""Key of a page's content: the serial number of the previous page (0 for none), and the tokens."""


class PagePool:
    """Cache pages with counts of their users.

    A page without users keeps its content until the page is reused. A sequence that begins with the
    same tokens can share the page.
    """

    def __init__(self, page: int, limit: int | None, *, keep: bool = True) -> None:
        """Make a pool of at most ``limit`` pages of ``page`` tokens; None for no limit.

        Without ``keep``, pages without users are reused before the pool grows.
        """
        self.page, self._limit, self._keep = page, limit, keep
        self.made = 0
        """Number of pages that have ever been used."""
        self._users: list[int] = []
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages with content but without users, in the order of their last use."""
        self._known: dict[Prefix, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._serials: dict[int, int] = {}
        self._serial = 0

    def available(self) -> float:
        """Return the number of pages that can be taken; infinity without a limit."""
        unmade = float("inf") if self._limit is None else self._limit - self.made
        return len(self._free) + len(self._idle) + unmade

    def take(self) -> int:
        """Return a page without content for one user. A page must be available."""
        if self._free:
            page = self._free.pop()
        elif self._grows:
            page, self.made = self.made, self.made + 1
            self._users.append(0)
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    @property
    def _grows(self) -> bool:
        """Whether to use a new page rather than an idle page with content."""
        room = self._limit is None or self.made < self._limit
        return room and (self._keep or not self._idle)

    def share(self, page: int) -> None:
        """Count another user of a page."""
        self._users[page] += 1
        self._idle.pop(page, None)

    def release(self, pages: list[int]) -> None:
        """Undo one ``take`` or ``share`` of each page.

        The last page of a sequence is reused first, because the pages before it can be shared
        without it.
        """
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._prefixes:
                self._idle[page] = None
            else:
                self._free.append(page)

    def store(self, page: int, before: int | None, tokens: tuple[int, ...]) -> None:
        """Record the tokens of a page, which follow the tokens of the page ``before``."""
        parent = 0 if before is None else self._serials.get(before)
        if parent is None or (parent, tokens) in self._known or page in self._prefixes:
            return  # another page has the same tokens
        self._serial += 1
        self._known[parent, tokens] = page
        self._prefixes[page], self._serials[page] = (parent, tokens), self._serial

    def find(self, tokens: list[int]) -> list[int]:
        """Return the pages of the longest known prefix of ``tokens``, without the last token.

        The model must process the last token, because its logits are needed.
        """
        found: list[int] = []
        parent = 0
        for end in range(self.page, len(tokens), self.page):
            page = self._known.get((parent, tuple(tokens[end - self.page : end])))
            if page is None:
                break
            found.append(page)
            parent = self._serials[page]
        return found

    def forget(self) -> None:
        """Stop sharing all pages, because the weights have changed."""
        self._free.extend(self._idle)
        self._idle.clear()
        for page in list(self._prefixes):
            self._forget(page)

    def idle_among(self, pages: list[int]) -> int:
        """Return the number of these pages that have content but no user."""
        return sum(page in self._idle for page in pages)

    def _forget(self, page: int) -> None:
        del self._known[self._prefixes.pop(page)], self._serials[page]
