"""Text as token ids, and messages between two turns as the chat template writes them. Torch-free.

A message's tokens are added to those that the policy has drawn. The conversation is never rendered
and tokenised again: a tokenizer may have other ids for the text of a turn than the policy drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dialogue:
    """The tokenizer and the chat template of a dataset, if it has one."""

    def __init__(self, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._template = ChatTemplate(dataset, tokenizer) if dataset.is_chat else None
        self._pieces: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        """What the template puts around the texts of messages, by their roles."""
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text. Names of special tokens in it are ordinary text, so that no
        message can end a turn or pretend to be another role."""
        return tuple(
            self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def messages(self, said: Sequence[tuple[str, str]], behind: int | None) -> tuple[int, ...]:
        """Messages, each a role and a text, behind a turn with the last token ``behind``, up to
        where the next turn begins. Without a chat template they are the texts alone."""
        texts = [self.encode(text) for _, text in said]
        if self._template is None:
            return tuple(token for text in texts for token in text)
        first, *others = self._pieces_of(tuple(role for role, _ in said))
        if first[:1] == (behind,):  # the policy has written the token that ends its turn
            first = first[1:]
        tokens = list(first)
        for text, piece in zip(texts, others, strict=True):
            tokens += (*text, *piece)
        return tuple(tokens)

    def _pieces_of(self, roles: tuple[str, ...]) -> list[tuple[int, ...]]:
        if roles not in self._pieces:
            assert self._template is not None
            self._pieces[roles] = [
                tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
                for text in self._template.around_messages(roles)
            ]
        return self._pieces[roles]
