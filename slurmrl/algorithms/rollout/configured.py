"""The configured episodes: what the trainers' generate call and rollout tasks have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.rollout.sampling import (
    completions,
    generation_options,
    sampling_key,
    sampling_seed,
    stream,
)
from slurmrl.config.schema import Config
from slurmrl.data.sample import SequenceSample
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.episode_runner import EpisodeOutcome, EpisodeRunner
from slurmrl.rollouts.episodes import make_episode
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.policy import Dialogue, Draws, EpisodeLimits, Waiting
from slurmrl.rollouts.tools.toolbox import make_tools


class ConfiguredEpisodes:
    """Runs episodes. Holds their tools until it is closed."""

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
    ) -> list[EpisodeOutcome]:
        """See `EpisodeRunner.run`."""
        dialogue, draws = self._dialogue(context), _draws(context)
        return await self._runner.run(items, engine, dialogue, draws, waiting, slots=slots)

    def _dialogue(self, context: CallContext) -> Dialogue:
        if context.evaluation not in self._dialogues:
            self._dialogues[context.evaluation] = Dialogue(context.dataset, context.tokenizer)
        return self._dialogues[context.evaluation]


def episode_items(sample: SequenceSample, context: CallContext) -> list[EpisodeItem]:
    """The prompts, once for each of their completions, which are side by side."""
    tokens = sample.tensor("prompt_ids").tolist()
    metadata, cuts = sample.metadata, sample.cu_seqlens("prompt_ids").tolist()
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
        )
        for place, (name, (start, stop)) in enumerate(zip(sample.ids, pairwise(cuts), strict=True))
        for index in range(completions(context))
    ]


def _draws(context: CallContext) -> Callable[[EpisodeItem], Draws]:
    options, seed = generation_options(context), sampling_seed(context)

    def of(item: EpisodeItem) -> Draws:
        name = stream(item.sample_id, item.index)
        return Draws(
            options=options,
            seed=seed,
            step=context.step,
            key_of=lambda suffix: sampling_key(name + suffix),
        )

    return of
