"""Tokens of strings and conversations, with the tokenizer and the chat template of a dataset.

Only transformers may import torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import ChatTemplate, MarkedText
from slurmrl.data.conversations import Message
from slurmrl.data.image_sources import ImageFiles
from slurmrl.data.tokenizer import end_id, text_ids, without_ends
from slurmrl.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slurmrl.data.image_files import Pictured
    from slurmrl.data.picture_encoder import PictureEncoder


class TokenSequence(NamedTuple):
    """The tokens of one sequence, and which of them are targets (trained on)."""

    tokens: Sequence[int]
    runs: Sequence[int]
    """Lengths of alternating runs of tokens: context, targets, context, …"""
    pictures: bytes = b""
    """Content key of its pictures (`tensors.pictures`); empty without pictures."""

    @staticmethod
    def of(prompt: Sequence[int], answer: Sequence[int]) -> TokenSequence:
        return TokenSequence([*prompt, *answer], [len(prompt), len(answer)])

    @staticmethod
    def masked(tokens: Sequence[int], targets: Sequence[bool]) -> TokenSequence:
        """Make a sequence whose targets are the tokens with True in ``targets``."""
        runs = [] if targets and not targets[0] else [0]
        runs += [len(list(run)) for _, run in groupby(targets)]
        return TokenSequence(tokens, runs)

    @property
    def context(self) -> Sequence[int]:
        """The tokens before the first target."""
        return self.tokens[: self.runs[0]]

    def after(self, context: Sequence[int]) -> TokenSequence:
        """Return the sequence with ``context`` before its first target."""
        tokens = [*context, *self.tokens[self.runs[0] :]]
        return TokenSequence(tokens, [len(context), *self.runs[1:]])

    def cut(self, most: int | None) -> TokenSequence:
        """Return the sequence with its first ``most`` tokens; with all tokens if None."""
        if most is None or len(self.tokens) <= most:
            return self
        ends = [min(end, most) for end in accumulate(self.runs)]
        return TokenSequence(
            self.tokens[:most], [stop - start for start, stop in pairwise([0, *ends])]
        )


RowTokens = Sequence[TokenSequence]
"""The sequences of one row."""


def expanded(runs: Sequence[int]) -> list[bool]:
    """Return True for each token of a context run, False for each target (see `TokenSequence`)."""
    pieces = ([place % 2 == 0] * length for place, length in enumerate(runs))
    return list(chain.from_iterable(pieces))


Chat = tuple[Sequence[Message], Any]
"""Messages, and the tools that they can use."""


class Encoder:
    """Tokenizes strings and conversations.

    :raises ConfigError: the dataset needs a chat template that is missing.
    """

    def __init__(
        self,
        config: DatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        directory: Path | None = None,
    ) -> None:
        """``directory`` receives the rows' pictures; None writes no pictures."""
        self._config, self._directory = config, directory
        self.images = ImageFiles()
        """The files of images and videos that were read."""
        self._tokenizer = tokenizer
        self._continuations = Continuations(tokenizer)
        self.chat = ChatTemplate(config, tokenizer) if config.is_chat else None

    @property
    def end(self) -> int:
        """The end-of-text token."""
        return end_id(self._tokenizer)

    def without_end(self, text: str) -> str:
        """Remove the end-of-text token from the end of a string: every answer gets this token."""
        return without_ends(text, [str(self._tokenizer.eos_token)])

    def no_token(self, what: str) -> str:
        return f"the tokenizer {self._tokenizer.name_or_path} produces no token for this {what}"

    def texts(self, texts: Sequence[str], *, begin: bool) -> list[list[int]]:
        return text_ids(self._tokenizer, texts, begin=begin)

    def answers(self, texts: Sequence[str], prompts: Sequence[list[int] | str]) -> list[list[int]]:
        """Return the tokens of ``texts``, which continue prompts.

        An element of ``prompts`` is a list of tokens, or the reason why the prompt has no tokens.
        """
        ends = [None if isinstance(ids, str) else ids[-1] for ids in prompts]
        return self._continuations.ids(texts, ends)

    def chat_prompts(self, chats: Sequence[Chat]) -> list[list[int] | str]:
        """Return the tokens of each rendered prompt, or the reason why the template rejects it.

        Only the template adds a begin-of-text token.
        """
        assert self.chat is not None
        texts: list[str] = []
        reasons: dict[int, str] = {}
        for place, (messages, tools) in enumerate(chats):
            try:
                texts.append(self.chat.prompt(messages, tools))
            except ChatTemplateError as error:
                reasons[place] = str(error)
        ids = iter(self.texts(texts, begin=False))
        return [reasons[place] if place in reasons else next(ids) for place in range(len(chats))]

    @cached_property
    def _pictures(self) -> PictureEncoder:
        from slurmrl.data.picture_encoder import PictureEncoder  # for image datasets

        return PictureEncoder(self._config, self._tokenizer, self._directory, self.images)

    def pictured(self, chat: Pictured, tools: Any, *, prompt: bool) -> RowTokens | str:
        """Return the tokens of a conversation with images and videos, or why it has no tokens.

        With ``prompt``, the conversation ends with the beginning of the assistant's turn and has no
        targets. Otherwise the assistant's turns are the targets.
        """
        assert self.chat is not None
        messages, images, videos = chat
        if not images and not videos and not prompt:
            return self.conversations([(messages, tools)])[0]
        if not images and not videos:
            (ids,) = self.chat_prompts([(messages, tools)])
            if isinstance(ids, str):
                return ids
            return [TokenSequence.of(ids, [])] if ids else self.no_token("prompt")
        try:
            if prompt:
                marked = MarkedText(self.chat.prompt(messages, tools), [])
            else:
                marked = self.chat.conversation(messages, tools)
        except ChatTemplateError as error:
            return str(error)
        made = self._pictures.encode(marked, images, videos)
        if isinstance(made, str):
            return made
        if prompt:
            return [TokenSequence(made.tokens, [len(made.tokens)], made.key)]
        masked = self._masked(made.tokens, made.offsets, made.marked)
        return masked if isinstance(masked, str) else [masked[0]._replace(pictures=made.key)]

    def conversations(self, chats: Sequence[Chat]) -> list[RowTokens | str]:
        """Return the tokens of each conversation, or the reason why it has no tokens.

        The assistant's turns are the targets.
        """
        assert self.chat is not None
        marked: list[MarkedText | str] = []
        for messages, tools in chats:
            try:
                marked.append(self.chat.conversation(messages, tools))
            except ChatTemplateError as error:
                marked.append(str(error))
        texts = iter(self._tokens([each for each in marked if not isinstance(each, str)]))
        return [each if isinstance(each, str) else next(texts) for each in marked]

    def _tokens(self, marked: Sequence[MarkedText]) -> list[RowTokens | str]:
        if not marked:
            return []
        made = self._tokenizer(
            [each.text for each in marked],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
        )
        rows = zip(made.input_ids, made.offset_mapping, marked, strict=True)
        return [self._masked(ids, offsets, each) for ids, offsets, each in rows]

    def _masked(
        self, ids: list[int], offsets: Sequence[tuple[int, int]], marked: MarkedText
    ) -> RowTokens | str:
        """Mark the tokens inside the targets.

        Return a problem for a token that is only partly inside: in generation, a turn begins with a
        new token, so the same text would have other tokens.
        """
        spans = iter(marked.targets)
        first, last = next(spans, (0, 0))
        targets = []
        for begin, end in offsets:
            while begin >= last > first:
                first, last = next(spans, (0, 0))
            inside = first <= begin < end <= last
            if not inside and begin < last and end > first:
                shown = repr(marked.text[begin:end])
                return (
                    f"the token {shown} contains both context and the assistant's turn, so the "
                    "chat template does not fit the tokenizer: no loss mask is correct"
                )
            targets.append(inside)
        if not any(targets):
            return self.no_token("assistant's turn")
        return [TokenSequence.masked(ids, targets)]


ANCHORS: Final = ("\n", ")", "0", "z", "é")
"""Strings that precede a continuation. Few tokenizers merge all five with the next token."""
PROBE: Final = "a"


class Continuations:
    """Tokenizes strings that continue a context.

    Many tokenizers (Llama 2, Mistral, T5) add a space at the beginning of a string. A continuation
    must not begin with such a space. Each string is therefore tokenized with an anchor before it,
    and the anchor's tokens are removed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._begins_again = cache(self._adds_space_after)

    def ids(
        self, texts: Sequence[str], after: Sequence[int | None], *, literal: bool = False
    ) -> list[list[int]]:
        """Return the token ids of each text after a context that ends with the token ``after``.

        None as ``after`` stands for any ordinary token. ``literal`` reads names of special tokens
        as ordinary text.
        """
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
        """The anchors with their tokens; empty if the tokenizer adds no space to strings."""
        found = list(self._separate_anchors())
        alone, *anchored = self._tokens([PROBE, *(anchor + PROBE for anchor, _ in found)])
        rest = [ids[len(start) :] for ids, (_, start) in zip(anchored, found, strict=True)]
        return [] if alone in rest else found

    def _separate_anchors(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the anchors that the tokenizer keeps and does not merge with the probe."""
        for anchor in ANCHORS:
            start, joint = self._tokens([anchor, anchor + PROBE])
            if joint[: len(start)] == start and anchor in self._tokenizer.decode(start):
                yield anchor, start

    def _adds_space_after(self, token: int | None) -> bool:
        """Return whether the tokenizer begins text with a space again after a special token."""
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
