"""The pages of the key-value cache: who uses them, and which tokens they hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Prefix = tuple[int, tuple[int, ...]]
"""The serial number of the page before, 0 for none, and a page's tokens."""


class PagePool:
    """Pages with numbers of users.

    A page without users keeps its content until it is needed, so a sequence that begins with the
    same tokens can share it.
    """

    def __init__(self, page: int, limit: int | None, *, keep: bool = True) -> None:
        """Pages of ``page`` tokens; ``limit`` is their number, None for no limit.

        Without ``keep`` the content of pages without users is given up before further pages are
        used.
        """
        self.page, self._limit, self._keep = page, limit, keep
        self.made = 0
        """Pages that were ever used."""
        self._users: list[int] = []
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages with content but without users; those that were used last come last."""
        self._known: dict[Prefix, int] = {}
        self._prefixes: dict[int, Prefix] = {}
        self._serials: dict[int, int] = {}
        self._serial = 0

    def available(self) -> float:
        """Pages that can be taken; infinite without a limit."""
        unmade = float("inf") if self._limit is None else self._limit - self.made
        return len(self._free) + len(self._idle) + unmade

    def take(self) -> int:
        """A page for one user, without content. One must be available."""
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
        """Whether to use another page rather than one with content."""
        room = self._limit is None or self.made < self._limit
        return room and (self._keep or not self._idle)

    def share(self, page: int) -> None:
        """Count another user of a page."""
        self._users[page] += 1
        self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Undo one ``take`` or ``share`` of each page.

        The last page of a sequence is reused first: without it, the pages before it can still be
        shared.
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
        """Record that a page holds these tokens behind those of the page ``before``."""
        parent = 0 if before is None else self._serials.get(before)
        if parent is None or (parent, tokens) in self._known or page in self._prefixes:
            return  # another page holds the same
        self._serial += 1
        self._known[parent, tokens] = page
        self._prefixes[page], self._serials[page] = (parent, tokens), self._serial

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that hold the longest known prefix of ``tokens`` without its last token.

        The logits of the last token are needed.
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
        """Let no page be shared any more: the weights have changed."""
        self._free.extend(self._idle)
        self._idle.clear()
        for page in list(self._prefixes):
            self._forget(page)

    def idle_among(self, pages: Sequence[int]) -> int:
        """How many of these pages have no user."""
        return sum(page in self._idle for page in pages)

    def _forget(self, page: int) -> None:
        del self._known[self._prefixes.pop(page)], self._serials[page]
