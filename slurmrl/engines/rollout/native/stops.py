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

    A token is at least one byte of text, so only as many tokens as the longest string has bytes
    matter.
    """
    last = tokens[-max(len(stop.encode()) for stop in stop_strings) - MARGIN :]
    text = decode(last)
    found = [stop for stop in stop_strings if stop in text]
    if not found:
        return False
    pairs = enumerate(zip(text, before := decode(last[:-1]), strict=False))
    known = next((n for n, (new, old) in pairs if new != old), len(before))
    return any(stop in text[max(known - len(stop) + 1, 0) :] for stop in found)
