"""Stop strings: the text of a completion's last tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slurmrl.rollouts.generation.base import Decode

MARGIN = 4
"""Tokens that are decoded before the longest possible match: tokenizers treat the first token of a
text differently."""


def ends_with_stop(decode: Decode, tokens: Sequence[int], stop_strings: Sequence[str]) -> bool:
    """Whether the last of a completion's ``tokens`` completes one of ``stop_strings``.

    A stop string may begin and end within tokens. A token has at least one byte, so only as many
    tokens matter as the longest string has bytes.
    """
    last = tokens[-max(len(stop.encode()) for stop in stop_strings) - MARGIN :]
    text = decode(last)
    found = [stop for stop in stop_strings if stop in text]
    if not found:
        return False
    known = len(os.path.commonprefix((text, decode(last[:-1]))))  # noqa: RUF071 - as of any texts
    return any(stop in text[max(known - len(stop) + 1, 0) :] for stop in found)
