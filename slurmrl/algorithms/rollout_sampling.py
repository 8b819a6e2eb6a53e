"""Number, options and random streams of completions, and the runner of episodes.

The trainers' generate call and rollout tasks share this code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.schema import routes, supports
from slurmrl.config.schema import Config
from slurmrl.data.sample import SequenceSample, pictures_of
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.episodes import EpisodeRunner, make_episode
from slurmrl.rollouts.generation.base import GenerationOptions, RolloutEngine
from slurmrl.rollouts.policy import Dialogue, EpisodeLimits, TokenSampling, Waiting
from slurmrl.rollouts.tools import make_tools


def completions(context: CallContext) -> int:
    """Return the number of completions of each prompt."""
    rollout, evaluation = context.settings.config.rollout, context.settings.config.evaluation
    return evaluation.n if context.evaluation and evaluation is not None else rollout.n


def generation_options(context: CallContext) -> GenerationOptions:
    """Return the generation options of the rollout or, in an evaluation, of the evaluation."""
    config = context.settings.config
    rollout, evaluation = config.rollout, config.evaluation
    if context.evaluation and evaluation is not None:
        return GenerationOptions(
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            temperature=evaluation.temperature,
            greedy=evaluation.greedy,
            stop_token_ids=context.stop_token_ids,
            stop_strings=rollout.stop_strings,
        )
    return GenerationOptions(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=rollout.greedy,
        stop_token_ids=context.stop_token_ids,
        stop_strings=rollout.stop_strings,
        masks=bool(supports(context.settings.algorithm, config)),
        experts=bool(routes(context.settings.algorithm, config)) and not rollout.greedy,
    )


def sampling_keys(ids: tuple[str, ...], completions: int = 1) -> Tensor:
    """Return a stable hash for each completion of each sample id: int64 [S].

    The tokens of a completion depend on this hash, and not on the batch, the rank or the number of
    completions.
    """
    names = (stream(name, place) for name in ids for place in range(completions))
    return torch.tensor([sampling_key(name) for name in names], dtype=torch.int64)


def stream(name: str, place: int) -> str:
    """Return the name of a completion's random stream: ``id`` for place 0, else ``id#place``.

    A sample id ends with ``@<epoch>``, so the name differs from all sample ids.
    """
    return f"{name}#{place}" if place else name


def sampling_seed(context: CallContext) -> int:
    """Return the seed of the random streams."""
    return evaluation_seed(context.seed) if context.evaluation else context.seed


def evaluation_seed(seed: int) -> int:
    """Return the seed of the evaluation's separate random stream, in 0..2^63-1."""
    return sampling_key(f"eval {seed}") & (2**63 - 1)


def sampling_key(name: str) -> int:
    """Return the random stream of a name, int64."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


class ConfiguredEpisodes:
    """Runs episodes, and keeps their tools until `close`."""

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self.tools = make_tools(rollout.episode.tools)
        limits = EpisodeLimits(turns=rollout.episode.max_turns, tokens=rollout.most_tokens)
        episode = make_episode(rollout.episode, self.tools)
        self._runner = EpisodeRunner(episode, self.tools, rollout.episode, limits)
        self._dialogues: dict[bool, Dialogue] = {}

    def close(self) -> None:
        self.tools.close()

    async def run(
        self,
        engine: RolloutEngine,
        items: Sequence[EpisodeItem],
        context: CallContext,
        waiting: Waiting,
        *,
        slots: asyncio.Semaphore | None = None,
    ) -> list[Completion]:
        """Run the episodes of the items as `EpisodeRunner.run` does."""
        dialogue, sampling = self._dialogue(context), _sampling(context)
        return await self._runner.run(items, engine, dialogue, sampling, waiting, slots=slots)

    def _dialogue(self, context: CallContext) -> Dialogue:
        if context.evaluation not in self._dialogues:
            self._dialogues[context.evaluation] = Dialogue(context.dataset, context.tokenizer)
        return self._dialogues[context.evaluation]


def episode_items(sample: SequenceSample, context: CallContext) -> list[EpisodeItem]:
    """Return an item for each completion; the items of a prompt are adjacent."""
    tokens = sample.tensor("prompt_ids").tolist()
    metadata, cuts = sample.metadata, sample.cu_seqlens("prompt_ids").tolist()
    pictures = pictures_of(sample)
    return [
        EpisodeItem(
            sample_id=name,
            index=index,
            prompt=tuple(tokens[start:stop]),
            text=metadata["prompt"][place],
            answer=metadata["answer"][place],
            row=metadata["row"][place],
            step=context.step,
            evaluation=context.evaluation,
            pictures=pictures[place],
        )
        for place, (name, (start, stop)) in enumerate(zip(sample.ids, pairwise(cuts), strict=True))
        for index in range(completions(context))
    ]


def _sampling(context: CallContext) -> Callable[[EpisodeItem], TokenSampling]:
    options, seed = generation_options(context), sampling_seed(context)

    def of(item: EpisodeItem) -> TokenSampling:
        name = stream(item.sample_id, item.index)
        return TokenSampling(
            options=options,
            seed=seed,
            step=context.step,
            key_of=lambda suffix: sampling_key(name + suffix),
        )

    return of
