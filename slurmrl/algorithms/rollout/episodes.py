"""Completions of prompts by episodes of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.rollout.configured import ConfiguredEpisodes, episode_items
from slurmrl.algorithms.rollout.recorded import add_experts, add_support
from slurmrl.algorithms.rollout.sampling import completions, generation_options
from slurmrl.algorithms.rollout.totals import Totals
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import SampledSupport
from slurmrl.data.tokenizer import decoding
from slurmrl.engines.base import ServingEngine
from slurmrl.engines.lockstep import LockstepEngine
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.policy import Waiting
from slurmrl.rollouts.runner import EpisodeOutcome

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class EpisodeGeneration:
    """Generates by the configured episodes. Holds the tools of this rank until it is closed."""

    def __init__(self, context: CallContext) -> None:
        self._episodes = ConfiguredEpisodes(context.settings.config)

    def close(self) -> None:
        self._episodes.close()

    def generate(
        self, engine: GenerateEngine, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The keys of `RolloutInterface.generate`, with ``prompt_mask`` True on every token that
        the policy did not write, and ``turn_rewards``. Ranks that compute the same as their leader
        have no result."""
        outcomes = self._outcomes(engine, episode_items(sample, context), context)
        if outcomes is None:
            return CallResult()
        stats = Totals.of_outcomes(outcomes).stats(turns=True, tools=bool(self._episodes.tools))
        count = completions(context)
        made = _as_sample(sample.ids, outcomes, count, engine.context.device)
        options = generation_options(context)
        if options.support:
            add_support(made, _support(outcomes))
        if options.experts:
            add_experts(made, [outcome.completions.routes() for outcome in outcomes])
        return CallResult(made, stats)

    def _outcomes(
        self, engine: GenerateEngine, items: Sequence[EpisodeItem], context: CallContext
    ) -> list[EpisodeOutcome] | None:
        """The ends of the episodes; None on a rank that computes what its leader asks for."""
        waiting = Waiting()
        version = str(context.step)
        if isinstance(engine, ServingEngine) and engine.serves_requests:
            episode = context.settings.config.rollout.episode
            rows, memory = episode.concurrency, episode.cache_bytes
            decode = decoding(context.tokenizer)
            with engine.serving(version, rows=rows, cache_bytes=memory, decode=decode) as served:
                if served is None:
                    return None
                return asyncio.run(self._episodes.run(served, items, context, waiting))
        lockstep = LockstepEngine(engine, version)
        return lockstep.run(
            lambda: self._episodes.run(lockstep, items, context, waiting), waiting.settled
        )


def _as_sample(
    ids: tuple[str, ...], outcomes: Sequence[EpisodeOutcome], count: int, device: torch.device
) -> SequenceSample:
    ended = [outcome.completions for outcome in outcomes]
    none = [[0.0] * len(each.prompt) for each in ended]
    mask = [
        [*(True for _ in each.prompt), *(not written for written in each.written)] for each in ended
    ]
    logprobs = [start + each.logprobs for start, each in zip(none, ended, strict=True)]
    rewards = [start + each.rewards for start, each in zip(none, ended, strict=True)]
    data: dict[str, Tensor | None] = {
        "input_ids": _packed([each.sequence for each in ended], torch.int64, device),
        "prompt_mask": _packed(mask, torch.bool, device),
        "logprobs": _packed(logprobs, torch.float32, device),
        TURN_REWARDS: _packed(rewards, torch.float32, device),
    }
    lengths = [len(row) for row in mask]
    rows = [lengths[first : first + count] for first in range(0, len(lengths), count)]
    finished = torch.tensor([each.finished for each in ended], dtype=torch.bool)
    return SequenceSample.grouped(rows, ids, data, per_sequence={"finished": finished})


def _support(outcomes: Sequence[EpisodeOutcome]) -> SampledSupport:
    support = SampledSupport()
    for outcome in outcomes:
        support.skip(len(outcome.completions.prompt))
        support.extend(outcome.completions.support)
    return support


def _packed(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype, device=device)
