"""Starts of a server that were over: how many have failed in a row, and whether more would help."""

from __future__ import annotations

from dataclasses import dataclass

MOST_FAILED_STARTS = 3


@dataclass(frozen=True, kw_only=True)
class EndedStart:
    """Why and how a start was over."""

    reason: str
    served_s: float = 0.0
    """Seconds for which it was ready."""
    asked: bool = False
    """Whether it got requests."""
    answered: bool = False
    """Whether it has answered one."""
    error: str = ""
    """What its log says if the server ended by itself, in words that do not change from start to
    start; empty if a server on another host may not meet it."""

    def good(self, stable_s: float) -> bool:
        """Whether it had started well: it was ready for ``stable_s`` and did what it was asked."""
        return self.served_s >= stable_s and (self.answered or not self.asked)


class FailedStarts:
    """Counts starts that failed in a row."""

    def __init__(self, stable_s: float) -> None:
        """``stable_s``: after which a start that was ready counts as good."""
        self._stable_s = stable_s
        self._error = ""
        self._alike = 0
        self.count = 0

    def add(self, ending: EndedStart) -> None:
        self.count = 1 if ending.good(self._stable_s) else self.count + 1
        same = bool(ending.error) and not ending.answered
        self._alike = self._alike + 1 if same and ending.error == self._error else int(same)
        self._error = ending.error

    @property
    def enough(self) -> bool:
        """Whether the server is not to be started again now."""
        return self.hopeless or self.count >= MOST_FAILED_STARTS

    @property
    def hopeless(self) -> bool:
        """Whether the last starts ended with the same error before they answered a request, so that
        another one would as well."""
        return self._alike >= MOST_FAILED_STARTS
