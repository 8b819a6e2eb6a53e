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
        self._pieces: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """What the template puts before and after the text of a message, by role."""
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text. Names of special tokens in it are ordinary text, so that no
        message can end a turn or pretend to be another role."""
        return tuple(
            self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        )

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def message(self, text: str, role: str, behind: int | None) -> tuple[int, ...]:
        """A message behind a turn with the last token ``behind``, up to where the next turn begins.
        Without a chat template it is the text alone."""
        if self._template is None:
            return self.encode(text)
        before, after = self._pieces_of(role)
        if before[:1] == (behind,):  # the policy has written the token that ends its turn
            before = before[1:]
        return (*before, *self.encode(text), *after)

    def _pieces_of(self, role: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if role not in self._pieces:
            assert self._template is not None
            texts = self._template.around_message(role)
            before, after = (
                tuple(self._tokenizer(text, add_special_tokens=False).input_ids) for text in texts
            )
            self._pieces[role] = before, after
        return self._pieces[role]
