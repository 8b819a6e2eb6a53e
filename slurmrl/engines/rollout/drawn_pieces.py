"""A completion that is drawn by one request after the other, as an update of weights ends each.

A server looks for stop strings in what it draws for one request. So that none is missed that spans
two requests, a request also stops at the rests of those that may have begun. It stops at strings
before ``min_new_tokens`` too; such a draw goes on.

Before a server aborts a request it draws once more, and does not look whether that ends it.

The experts are those of the last request, which has read the tokens of the others as its prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slurmrl.data.support import SampledSupport
from slurmrl.engines.rollout.base import Completion, Finish
from slurmrl.engines.rollout.dialect import Draw
from slurmrl.errors import RunFailedError

INCOMPLETE = "\ufffd"
"""In a text, for a character of which not all bytes are drawn."""


@dataclass(frozen=True, kw_only=True)
class DrawnPiece:
    """What one request has drawn. Its text is read for stop strings only."""

    completion: Completion
    text: str = ""
    stop: str = ""
    """The stop string that ended it."""


@dataclass
class PiecewiseDraw:
    """What a draw has so far."""

    draw: Draw
    pieces: list[DrawnPiece] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.completion.tokens)

    def rest(self) -> Draw:
        """The draw of what is missing. It begins again if the last piece was aborted within a
        character that a stop string may have. One that a stop string has ended there would end
        there again, so the draw goes on, and misses a stop string with that character."""
        stops = self.draw.options.stop_strings
        aborted = bool(self.pieces) and self.pieces[-1].completion.finish == "aborted"
        if stops and aborted and self._text.endswith(INCOMPLETE):
            self.pieces.clear()
        options, tokens = self.draw.options, self.tokens
        left = replace(
            options,
            max_new_tokens=options.max_new_tokens - len(tokens),
            min_new_tokens=max(options.min_new_tokens - len(tokens), 0),
            stop_strings=(*stops, *self._rests_of_stops()),
        )
        return replace(self.draw, prompt=self.draw.prompt + tokens, options=left)

    def add(self, piece: DrawnPiece) -> Finish | None:
        """How the draw has ended; "aborted" if only the piece has. None: the piece ended at a stop
        string before the least number of tokens, or at the rest of one that did not follow its
        beginning, so that the draw goes on."""
        self.pieces.append(piece)
        if self._is_stopped(piece):
            return "stop"
        if len(self.tokens) >= self.draw.options.max_new_tokens:
            return "length"
        return None if piece.stop else piece.completion.finish

    def _is_stopped(self, piece: DrawnPiece) -> bool:
        """Whether the last token of the piece ends the draw. A server names one reason of several
        to stop, or none if it has aborted the piece."""
        options, tokens, text = self.draw.options, self.tokens, self._text
        if piece.completion.finish == "stop" and not piece.stop:
            return True  # at a stop token
        if not piece.completion.tokens or len(tokens) <= options.min_new_tokens:
            return False
        before, stops = len(text) - len(piece.text), options.stop_strings
        return (
            piece.stop in stops
            or tokens[-1] in options.stop_token_ids
            or any(stop in text[max(before - len(stop) + 1, 0) :] for stop in stops)
        )

    @property
    def _text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def _rests_of_stops(self) -> list[str]:
        """Of the stop strings whose beginnings the text so far ends with."""
        text, stops = self._text, self.draw.options.stop_strings
        cuts = ((stop, cut) for stop in stops for cut in range(1, len(stop)))
        return sorted({stop[cut:] for stop, cut in cuts if text.endswith(stop[:cut])} - {*stops})

    def completion(self, finish: Finish) -> Completion:
        pieces = [piece.completion for piece in self.pieces]
        read = self.draw.options.experts and finish != "aborted"
        experts = pieces[-1].experts if read else None
        if read and experts is None:
            raise RunFailedError(f"{self.draw.name}: the server aborted it without its experts")
        return Completion(
            tokens=self.tokens,
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            versions=tuple(version for piece in pieces for version in piece.versions),
            finish=finish,
            support=_support(pieces) if self.draw.options.support else None,
            experts=experts,
        )


def _support(pieces: Sequence[Completion]) -> SampledSupport:
    support = SampledSupport()
    for piece in pieces:
        assert piece.support is not None, "every piece of the draw has one"
        support.extend(piece.support)
    return support
