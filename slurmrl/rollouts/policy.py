"""The policy that writes the turns of an episode, and the tokens of messages. Torch-free.

The tokens of a message are appended to the tokens that the policy has sampled. The conversation is
never rendered and tokenized again, because new tokenization may give other ids.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from slurmrl.config.schema import Dataset as DatasetConfig
from slurmrl.data.chat import ChatTemplate
from slurmrl.data.encoder import Continuations
from slurmrl.errors import EpisodeLimitError, RunFailedError, UsageError
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest, RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slurmrl.rollouts.tools import Tools


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    turns: int
    tokens: int
    """Maximum number of tokens after the item's prompt."""


@dataclass(frozen=True, kw_only=True)
class TokenSampling:
    """Options and random streams for the tokens of an episode."""

    options: GenerationOptions
    seed: int
    step: int
    key_of: Callable[[str], int]
    """Function that returns the random stream for a suffix of the completion's name."""


class Waiting:
    """Counter of busy episodes. A busy episode does not wait for the engine and has not ended."""

    def __init__(self) -> None:
        self._elsewhere = 0
        self._settled = asyncio.Event()
        self._settled.set()

    def begin(self) -> None:
        """Count an episode as busy."""
        self._elsewhere += 1
        self._settled.clear()

    def end(self) -> None:
        self._elsewhere -= 1
        if not self._elsewhere:
            self._settled.set()

    async def settled(self) -> None:
        """Wait until all episodes wait for the engine or have ended."""
        await asyncio.sleep(0)
        while self._elsewhere:
            await self._settled.wait()


class Policy:
    """Writes the turns of one episode."""

    def __init__(
        self,
        item: EpisodeItem,
        engine: RolloutEngine,
        dialogue: Dialogue,
        sampling: TokenSampling,
        limits: EpisodeLimits,
        waiting: Waiting,
        clock: asyncio.Timeout,
    ) -> None:
        """``clock`` is the episode's time limit. The clock stops while the engine samples."""
        self._item, self._engine, self._dialogue = item, engine, dialogue
        self._sampling, self._limits = sampling, limits
        self._waiting, self._clock = waiting, clock
        self._name = f"{item.sample_id}#{item.index}"
        self._turns = 0
        self._pending = 0
        self._left_s = 0.0
        self._over = False
        self._from: Counter[int] = Counter()
        """Mapping from a number of tokens to the number of turns that began after it."""
        self.latest: Completion | None = None
        """The completion to which the policy has last added a turn."""
        self.limited = False
        """Whether the episode has reached a limit."""

    async def __call__(
        self, completions: Completion, *, max_new_tokens: int | None = None
    ) -> Completion:
        """Add a turn of up to ``max_new_tokens`` tokens (default: `rollout.max_new_tokens`).

        :raises EpisodeLimitError: no turn or token is left, so the episode ends unfinished.
        """
        if self._over:
            raise UsageError(f"episode {self._name} has ended: it cannot have another turn")
        self.latest = completions
        request, last = self._request(completions, max_new_tokens)
        self._turns += 1
        future = self._engine.submit(request)
        self._wait_for(future)
        (turn,) = await future
        if turn.finish == "aborted":
            raise RunFailedError(f"the engine aborted episode {self._name}")
        completions.wrote(turn)
        if last and turn.finish == "length":
            raise self._limit(f"the episode has reached its limit of {self._limits.tokens} tokens")
        dropped = turn.stopped and turn.tokens[-1] in request.options.stop_token_ids
        text = self._dialogue.decode(turn.tokens[: len(turn.tokens) - dropped])
        return replace(turn, text=text)

    def close(self) -> None:
        """End the episode."""
        self._over = True
        if not self._pending:
            self._waiting.end()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a string that continues a context, without special tokens."""
        return self._dialogue.encode(text)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """Decode token ids to a string without special tokens."""
        return self._dialogue.decode(tokens)

    def say(self, completions: Completion, text: str, role: str = "user") -> None:
        """Add a message in the form of the chat template; the policy reads it before its next turn.

        Without a chat template, add only ``text``.
        """
        self.say_all(completions, [(role, text)])

    def say_all(self, completions: Completion, said: Sequence[tuple[str, str]]) -> None:
        """Add several messages at once, each a role and a string."""
        turn = completions.ends_with_turn
        tokens = self._dialogue.messages(said, completions.sequence[-1], turn=turn)
        completions.read(tokens)

    def _request(
        self, completions: Completion, max_new_tokens: int | None
    ) -> tuple[GenerationRequest, bool]:
        """Return the request of a turn, and whether only the episode's tokens limit the turn."""
        if not completions.prompt:
            raise UsageError("an episode's prompt needs at least one token")
        prompt = completions.sequence
        if completions.largest_read >= self._dialogue.vocabulary:
            raise UsageError(f"token {completions.largest_read} is not in the vocabulary")
        left = self._limits.tokens - (len(prompt) - len(self._item.prompt))
        if self._turns >= self._limits.turns:
            raise self._limit(f"the episode has reached its limit of {self._limits.turns} turns")
        if left < 1:
            raise self._limit(f"the episode has reached its limit of {self._limits.tokens} tokens")
        options = self._sampling.options
        most = min(max_new_tokens or options.max_new_tokens, left)
        options = replace(
            options, max_new_tokens=most, min_new_tokens=min(options.min_new_tokens, most)
        )
        request = GenerationRequest(
            request_id=f"{self._name}/{self._turns}",
            prompt=prompt,
            keys=(self._key(len(prompt)),),
            seed=self._sampling.seed,
            step=self._sampling.step,
            options=options,
            pictures=self._item.pictures,
            # Later turns come first: their prompts are cached, and their groups end sooner.
            priority=self._limits.turns - self._turns,
        )
        return request, most == left

    def _limit(self, message: str) -> EpisodeLimitError:
        self.limited = True
        return EpisodeLimitError(message)

    def _key(self, begin: int) -> int:
        """Return the random stream of a turn.

        All turns use the completion's stream, in which the positions of tokens differ. A second
        turn from the same position gets a different stream.
        """
        again = self._from[begin]
        self._from[begin] += 1
        return self._sampling.key_of(f"/{again}" if again else "")

    def _wait_for(self, future: asyncio.Future[tuple[Completion, ...]]) -> None:
        """Suspend the episode's time limit until the engine answers."""
        loop = asyncio.get_running_loop()
        self._pending += 1
        if self._pending == 1:
            when = self._clock.when()
            assert when is not None, "it runs"
            self._left_s = when - loop.time()
            self._clock.reschedule(None)
            self._waiting.end()

        def answered(_: object) -> None:
            self._pending -= 1
            if not self._pending and not self._over:
                self._waiting.begin()
                if not self._clock.expired():
                    self._clock.reschedule(loop.time() + self._left_s)

        future.add_done_callback(answered)


class Episode(Protocol):
    """Contract of an episode, which users write as a class or a function.

    Each rank constructs a class once, with the configuration's options. A function gets the options
    with each call. The episodes of a rank run concurrently in one event loop, so an episode must
    await all slow operations. An exception fails only the episode that raises it.
    """

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completion:
        """Let ``policy`` write the turns of one completion."""
        ...


class Dialogue:
    """The tokenizer of a dataset, and its chat template, if any."""

    def __init__(self, dataset: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._template = ChatTemplate(dataset, tokenizer) if dataset.is_chat else None
        self._continuations = Continuations(tokenizer)
        self._pieces: dict[tuple[str, ...], list[str]] = {}
        self.vocabulary = len(self._tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a string that continues another string.

        Names of special tokens in the string are tokenized as ordinary characters. A message can
        therefore neither end a turn nor pretend to have another role.
        """
        return tuple(self._behind(None, text, literal=True))

    def require(self, roles: Sequence[str]) -> None:
        """Raise ChatTemplateError if the chat template cannot render messages of these roles."""
        self._pieces_of(tuple(roles))

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def messages(
        self, said: Sequence[tuple[str, str]], last: int, *, turn: bool
    ) -> tuple[int, ...]:
        """Return the tokens of messages (role, content), up to the beginning of the next turn.

        Without a chat template, return only the tokens of the contents. The context ends with the
        token ``last``. ``turn`` is true if the policy wrote this token.
        """
        if self._template is None:
            return self._joined(last, [(text, True) for _, text in said])
        first, *others = self._pieces_of(tuple(role for role, _ in said))
        parts = [(first, False)]
        for (_, text), piece in zip(said, others, strict=True):
            parts += [(text, True), (piece, False)]
        tokens = self._joined(last, parts)
        written = turn and tokens[:1] == (last,)  # the policy has already written this token
        return tokens[1:] if written else tokens

    def _joined(self, last: int, parts: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """Return the concatenated tokens of (string, literal), after the token ``last``."""
        tokens = [last]
        for text, literal in parts:
            tokens += self._behind(tokens[-1], text, literal=literal)
        return tuple(tokens[1:])

    def _behind(self, last: int | None, text: str, *, literal: bool) -> list[int]:
        (tokens,) = self._continuations.ids([text], [last], literal=literal)
        return tokens

    def _pieces_of(self, roles: tuple[str, ...]) -> list[str]:
        """Return the strings that the template puts around messages of these roles."""
        if roles not in self._pieces:
            assert self._template is not None
            self._pieces[roles] = self._template.around_messages(roles)
        return self._pieces[roles]
