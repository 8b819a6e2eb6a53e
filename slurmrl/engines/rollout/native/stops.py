"""Stop strings: the text of a completion's last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""
MARGIN = 4
"""Tokens that are decoded before the longest possible match: tokenizers treat the first token of a
text differently."""


def ends_with_stop(decode: Decode, tokens: Sequence[int], stop_strings: Sequence[str]) -> bool:
    """Whether the last of a completion's ``tokens`` completes one of ``stop_strings``, which may
    begin and end within tokens.

    A token is at least one byte of text, so only as many tokens as the string has bytes matter.
    """
    for stop in stop_strings:
        text = decode(tokens[-len(stop.encode()) - MARGIN :])
        if stop not in text:
            continue
        before = decode(tokens[-len(stop.encode()) - MARGIN : -1])
        if text.count(stop) > before.count(stop):
            return True
    return False
