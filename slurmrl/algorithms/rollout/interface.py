"""Completions of prompts: of one turn each, or by episodes of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.rollout.configured import ConfiguredEpisodes, episode_items
from slurmrl.algorithms.rollout.recorded import add_experts, add_support
from slurmrl.algorithms.rollout.sampling import (
    completions,
    generation_options,
    sampling_keys,
    sampling_seed,
)
from slurmrl.algorithms.rollout.totals import Totals
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.meta import SampledSupport
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import decoding
from slurmrl.engines.base import ServingOptions
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.episode_runner import EpisodeOutcome
from slurmrl.rollouts.generation.base import Completion, GenerationRequest, RolloutEngine
from slurmrl.rollouts.policy import Waiting

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class RolloutInterface(Interface):
    """Generates with the engine of the trainers' world.

    Holds the tools of this rank's episodes until it is closed.
    """

    def __init__(self) -> None:
        self._episodes: ConfiguredEpisodes | None = None

    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Generate the completions of each prompt.

        The result has

        - ``input_ids``: prompt and completion;
        - ``prompt_mask``: True on every token that the policy did not write;
        - ``logprobs``: log-probabilities under the sampling policy;
        - ``finished``: whether the completion ended with a stop token or stop string;
        - ``turn_rewards``: only for episodes.

        If they are recorded, it also has each token's sampling mask and the experts that processed
        the token (`data.meta`). Ranks that compute the same as their leader may have no result.
        """
        assert engine is not None
        episode = context.settings.config.rollout.episode
        if not episode.has_turns:
            ended = _single_turns(engine, sample, context)
            if ended is None:
                return CallResult()
            totals, tools = Totals.of_completions(ended), False
        else:
            outcomes = self._outcomes(engine, episode_items(sample, context), context)
            if outcomes is None:
                return CallResult()
            ended = [outcome.completions for outcome in outcomes]
            totals, tools = Totals.of_outcomes(outcomes), bool(episode.tools)
        made = _as_sample(sample.ids, ended, context, engine.context.device)
        return CallResult(made, totals.stats(turns=episode.has_turns, tools=tools))

    def _outcomes(
        self, engine: GenerateEngine, items: Sequence[EpisodeItem], context: CallContext
    ) -> list[EpisodeOutcome] | None:
        """The ends of the episodes; None on a rank that computes what its leader asks for."""
        if self._episodes is None:
            self._episodes = ConfiguredEpisodes(context.settings.config)
        waiting, episode = Waiting(), context.settings.config.rollout.episode
        options = ServingOptions(
            rows=episode.concurrency,
            cache_bytes=episode.cache_bytes,
            decode=decoding(context.tokenizer),
            settled=waiting.settled,
        )
        with engine.serving(str(context.step), options) as served:
            if served is None:
                return None
            return asyncio.run(self._episodes.run(served, items, context, waiting))

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None


def _single_turns(
    engine: GenerateEngine, sample: SequenceSample, context: CallContext
) -> list[Completions] | None:
    """The completions of one turn each, by one request for each prompt."""
    count, options = completions(context), generation_options(context)
    tokens, ends = sample.tensor("prompt_ids").tolist(), sample.cu_seqlens("prompt_ids").tolist()
    keys = sampling_keys(sample.ids, count).tolist()
    requests = [
        GenerationRequest(
            request_id=f"{context.step}-{number:07}",
            prompt=tuple(tokens[start:stop]),
            keys=tuple(keys[number * count : (number + 1) * count]),
            seed=sampling_seed(context),
            step=context.step,
            options=options,
        )
        for number, (start, stop) in enumerate(pairwise(ends))
    ]
    how = ServingOptions(decode=decoding(context.tokenizer), turns=False, support=options.support)
    with engine.serving(str(context.step), how) as served:
        if served is None:
            return None
        answers = asyncio.run(_answers(served, requests))
    return [
        Completions.of_turn(request.prompt, completion)
        for request, answer in zip(requests, answers, strict=True)
        for completion in answer
    ]


async def _answers(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> list[tuple[Completion, ...]]:
    return await asyncio.gather(*map(engine.submit, requests))


def _as_sample(
    ids: tuple[str, ...], ended: Sequence[Completions], context: CallContext, device: torch.device
) -> SequenceSample:
    """The completions, those of a prompt as one item."""
    count, options = completions(context), generation_options(context)
    none = [[0.0] * len(each.prompt) for each in ended]
    mask = [
        [*(True for _ in each.prompt), *(not written for written in each.written)] for each in ended
    ]
    logprobs = [start + each.logprobs for start, each in zip(none, ended, strict=True)]
    data: dict[str, Tensor | None] = {
        "input_ids": _packed([each.sequence for each in ended], torch.int64, device),
        "prompt_mask": _packed(mask, torch.bool, device),
        "logprobs": _packed(logprobs, torch.float32, device),
    }
    if context.settings.config.rollout.episode.has_turns:
        rewards = [start + each.rewards for start, each in zip(none, ended, strict=True)]
        data[TURN_REWARDS] = _packed(rewards, torch.float32, device)
    lengths = [len(row) for row in mask]
    rows = [lengths[first : first + count] for first in range(0, len(lengths), count)]
    finished = torch.tensor([each.finished for each in ended], dtype=torch.bool)
    made = SequenceSample.grouped(rows, ids, data, per_sequence={"finished": finished})
    if options.support:
        add_support(made, _support(ended))
    if options.experts:
        add_experts(made, [each.routes() for each in ended])
    return made


def _support(ended: Sequence[Completions]) -> SampledSupport:
    support = SampledSupport()
    for each in ended:
        support.skip(len(each.prompt))
        support.extend(each.support)
    return support


def _packed(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype, device=device)
