"""Text as token ids, and messages between two turns as the chat template writes them. Torch-free.

A message's tokens are added to those that the policy has drawn. The conversation is never rendered
and tokenised again: a tokenizer may have other ids for the text of a turn than the policy drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import ChatTemplate
from slurmrl.data.encoder import Continuations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialogue:
    """The tokenizer and the chat template of a dataset, if it has one."""

    def __init__(self, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._template = ChatTemplate(dataset, tokenizer) if dataset.is_chat else None
        self._continuations = Continuations(tokenizer)
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text behind another text.

        Names of special tokens in it are ordinary text, so that no message can end a turn or
        pretend to be another role.
        """
        return tuple(self._behind(None, text, literal=True))

    def require(self, roles: Sequence[str]) -> None:
        """Raise ChatTemplateError if the chat template has no place for messages of the roles."""
        self._pieces_of(tuple(roles))

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def messages(
        self, said: Sequence[tuple[str, str]], behind: int, *, turn: bool
    ) -> tuple[int, ...]:
        """Messages, each a role and a text, up to where the next turn begins.

        Without a chat template they are the texts alone. The context ends with the token
        ``behind``; ``turn`` says whether the policy wrote it.
        """
        if self._template is None:
            return self._joined(behind, [(text, True) for _, text in said])
        first, *others = self._pieces_of(tuple(role for role, _ in said))
        parts = [(first, False)]
        for (_, text), piece in zip(said, others, strict=True):
            parts += [(text, True), (piece, False)]
        tokens = self._joined(behind, parts)
        written = turn and tokens[:1] == (behind,)  # the token that ends the policy's turn
        return tokens[1:] if written else tokens

    def _joined(self, behind: int, parts: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """The tokens of texts, each literal or not, one behind the other."""
        tokens = [behind]
        for text, literal in parts:
            tokens += self._behind(tokens[-1], text, literal=literal)
        return tuple(tokens[1:])

    def _behind(self, last: int | None, text: str, *, literal: bool) -> list[int]:
        (tokens,) = self._continuations.ids([text], [last], literal=literal)
        return tokens

    def _pieces_of(self, roles: tuple[str, ...]) -> list[str]:
        """What the template puts around the texts of messages, by their roles."""
        if roles not in self._pieces:
            assert self._template is not None
            self._pieces[roles] = self._template.around_messages(roles)
        return self._pieces[roles]
