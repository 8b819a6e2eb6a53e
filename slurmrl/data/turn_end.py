"""How a chat template ends a turn of the assistant. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class EndOfTurn(NamedTuple):
    """The tokens of the tokenizer that end a turn.

    Generation stops at each of them, the assistant's turns are trained up to one of them, and a
    reward model is read at it.
    """

    tokens: tuple[str, ...] = ()
    """The texts of the tokens; none if the template ends a turn without a token. The first one is
    the token that comes before a message of the user."""
    by_next: bool = False
    """Whether the token is the beginning of the next message, as in GLM-4's template."""

    @staticmethod
    def of(tail: str, following: Sequence[str], known: Collection[str]) -> EndOfTurn:
        """Return the end of a turn.

        ``tail`` is the text after the content of the last turn, each of ``following`` the text
        between the content of a turn and the next message. ``known`` are the texts of the
        tokenizer's special and added tokens.
        """
        if own := _first(tail, known):
            return EndOfTurn((own.token,))
        nexts = [_first(text, known) for text in following]
        if nexts[0] is None or not nexts[0].leads:
            return EndOfTurn()
        return EndOfTurn(
            tuple(dict.fromkeys(each.token for each in nexts if each and each.leads)), True
        )

    def in_text(self, text: str, place: int, *, calls: bool) -> tuple[int, str]:
        """Return the end of a turn that the next message ends, and what must be added to the text
        because the conversation ends there: the token of that message.

        The turn's own text ends at ``place``; ``calls`` says whether it calls tools.
        """
        rest = text[place:]
        bare = rest.lstrip()
        if not bare:
            return len(text), self.tokens[-1 if calls else 0]
        token = max(filter(bare.startswith, self.tokens), key=len, default="")
        return (place + len(rest) - len(bare) + len(token) if token else place), ""


class _FirstToken(NamedTuple):
    token: str
    leads: bool
    """Whether only white space is before the token."""


def _first(text: str, known: Collection[str]) -> _FirstToken | None:
    """Return the first of the known tokens in a text: the longest one at its place."""
    found = [(text.find(token), -len(token), token) for token in known if token and token in text]
    if not found:
        return None
    place, _, token = min(found)
    return _FirstToken(token, not text[:place].strip())
