"""Token ids of texts that continue a context. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHORS: Final = ("\n", ")", "0", "z", "é")
"""Texts to put before another text; few tokenizers join all of them to it."""
PROBE: Final = "a"


class Continuations:
    """Tokenizes texts that continue a context.

    Many tokenizers begin each text with a space (Metaspace, Prepend: Llama 2, Mistral, T5). Inside
    a text they do not, so they tokenize a continuation behind an anchor, whose tokens are removed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._begins_again = cache(self._adds_space_after)

    def ids(
        self, texts: Sequence[str], after: Sequence[int | None], *, literal: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each text behind a context that ends with the token ``after``
        (None: any ordinary token). ``literal`` reads names of special tokens as ordinary text."""
        if not texts:
            return []
        rows = self._tokens(texts, literal)
        if not self._anchors:
            return rows
        places = [place for place, token in enumerate(after) if not self._begins_again(token)]
        for anchor, start in self._anchors:
            if not places:
                break
            anchored = self._tokens([anchor + texts[place] for place in places], literal)
            joined = []
            for place, tokens in zip(places, anchored, strict=True):
                if tokens[: len(start)] == start:
                    rows[place] = tokens[len(start) :]
                else:
                    joined.append(place)
            places = joined
        return rows

    @cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """The anchors with their tokens; none if the tokenizer begins no text with a space."""
        found = list(self._separate_anchors())
        alone, *anchored = self._tokens([PROBE, *(anchor + PROBE for anchor, _ in found)])
        rest = [ids[len(start) :] for ids, (_, start) in zip(anchored, found, strict=True)]
        return [] if alone in rest else found

    def _separate_anchors(self) -> Iterator[tuple[str, list[int]]]:
        """The anchors that the tokenizer keeps and does not join to the probe."""
        for anchor in ANCHORS:
            start, joint = self._tokens([anchor, anchor + PROBE])
            if joint[: len(start)] == start and anchor in self._tokenizer.decode(start):
                yield anchor, start

    def _adds_space_after(self, token: int | None) -> bool:
        """Whether the tokenizer begins a text with a space again behind a special token."""
        added = self._tokenizer.added_tokens_decoder.get(token)
        if added is None:
            return False
        joint, alone = self._tokens([added.content + PROBE, PROBE])
        return joint[-len(alone) :] == alone

    def _tokens(self, texts: Sequence[str], literal: bool = False) -> list[list[int]]:
        rows: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            **({"split_special_tokens": True} if literal else {}),
        ).input_ids
        return rows
