"""The calls that give a step its completions.

`RolloutInterface` generates completions with the trainers' engine, as single turns or in episodes.
`StoredInterface` reads the completions of rollout tasks from files. Both interfaces produce the
same keys and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface, Stats
from slurmrl.algorithms.rollout_sampling import (
    ConfiguredEpisodes,
    completions,
    episode_items,
    generation_options,
    sampling_keys,
    sampling_seed,
)
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.sequences import noted
from slurmrl.config.schema import Logging
from slurmrl.data.meta import EXPERTS, IDS, SIZES, SampledMasks
from slurmrl.data.sample import SequenceSample, pictures_of
from slurmrl.data.tokenizer import decoding
from slurmrl.engines.base import ServingOptions
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.completions import Completion, joined_masks
from slurmrl.rollouts.generation.base import GenerationRequest, RolloutEngine
from slurmrl.rollouts.policy import Waiting
from slurmrl.rollouts.sample_files import SampleGroup
from slurmrl.tensors.layout import Array

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class RolloutInterface(Interface):
    """Generates with the engine of the trainers' world; keeps the episodes' tools until `close`."""

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

        The result also has the recorded sampling masks and experts of the tokens (`data.meta`). A
        rank that repeats its leader's work may have no result.
        """
        assert engine is not None
        episode = context.settings.config.rollout.episode
        if not episode.has_turns:
            ended, tools = _single_turns(engine, sample, context), False
        else:
            ended = self._outcomes(engine, episode_items(sample, context), context)
            tools = bool(episode.tools)
        if ended is None:
            return CallResult()
        made = _as_sample(sample.ids, ended, context, engine.context.device)
        stats = Totals.of_completions(ended).stats(turns=episode.has_turns, tools=tools)
        return CallResult(made, stats)

    def _outcomes(
        self, engine: GenerateEngine, items: Sequence[EpisodeItem], context: CallContext
    ) -> list[Completion] | None:
        """Return the results of the episodes; None on a rank that follows its leader."""
        if self._episodes is None:
            self._episodes = ConfiguredEpisodes(context.settings.config)
        waiting, episode = Waiting(), context.settings.config.rollout.episode
        options = ServingOptions(
            rows=episode.concurrency,
            cache_bytes=episode.cache_bytes,
            decode=decoding(context.tokenizer),
            masked=generation_options(context).masks,
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
) -> list[Completion] | None:
    """Send one request for each prompt; return completions of one turn each."""
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
            pictures=pictures,
        )
        for number, ((start, stop), pictures) in enumerate(
            zip(pairwise(ends), pictures_of(sample), strict=True)
        )
    ]
    how = ServingOptions(decode=decoding(context.tokenizer), turns=False, masked=options.masks)
    with engine.serving(str(context.step), how) as served:
        if served is None:
            return None
        answers = asyncio.run(_answers(served, requests))
    return [
        replace(completion, prompt=request.prompt, finished=completion.stopped)
        for request, answer in zip(requests, answers, strict=True)
        for completion in answer
    ]


async def _answers(
    engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> list[tuple[Completion, ...]]:
    return await asyncio.gather(*map(engine.submit, requests))


def _as_sample(
    ids: tuple[str, ...], ended: Sequence[Completion], context: CallContext, device: torch.device
) -> SequenceSample:
    """Return the completions as a sample in which all completions of a prompt form one item."""
    count, options = completions(context), generation_options(context)
    none = [[0.0] * len(each.prompt) for each in ended]
    mask = [
        [*(True for _ in each.prompt), *(not written for written in each.written)] for each in ended
    ]
    logprobs = [(*start, *each.logprobs) for start, each in zip(none, ended, strict=True)]
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
    if options.masks:
        add_masks(made, joined_masks(ended))
    if options.experts:
        add_experts(made, [each.routes() for each in ended])
    return made


def _packed(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype, device=device)


class StoredInterface(Interface):
    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return the keys of `RolloutInterface.generate`, and ``turn_rewards`` of episodes.

        Raises SampleFileError, EnvironmentFailure.
        """
        read = context.stored
        assert read is not None, "the master names stored samples for this call"
        groups = [read(name) for name in sample.ids]
        episode = context.settings.config.rollout.episode
        turns, tools = episode.has_turns, bool(episode.tools)
        made = as_sample(sample.ids, groups, context.device, turns=turns)
        options = generation_options(context)
        if options.masks:
            add_masks(made, _stored_masks(groups))
        if options.experts:
            add_experts(made, [routes for group in groups for routes in group.routes()])
        stats = Totals.of_groups(groups).stats(turns=turns, tools=tools)
        kept = context.settings.config.logging
        return CallResult(made, stats, notes=_versions(sample.ids, groups, kept))


def as_sample(
    ids: tuple[str, ...],
    groups: Sequence[SampleGroup],
    device: torch.device | None = None,
    *,
    turns: bool,
    metadata: Mapping[str, list[Any]] | None = None,
) -> SequenceSample:
    """Return the groups as a sample. The tensors are on ``device``, like generated tokens."""
    data: dict[str, Tensor | None] = {
        "input_ids": _joined([each.input_ids for each in groups], torch.int64),
        "prompt_mask": _joined([each.drawn_by < 0 for each in groups], torch.bool),
        "logprobs": _joined([each.logprobs for each in groups], torch.float32),
    }
    if turns:
        data[TURN_REWARDS] = _joined([each.turn_rewards for each in groups], torch.float32)
    data = {key: None if value is None else value.to(device) for key, value in data.items()}
    rows = [each.lengths.tolist() for each in groups]
    finished = _joined([each.finished for each in groups], torch.bool)
    return SequenceSample.grouped(rows, ids, data, metadata, per_sequence={"finished": finished})


def _stored_masks(groups: Sequence[SampleGroup]) -> SampledMasks:
    masks = SampledMasks()
    for group in groups:
        if group.masks is None:
            masks.skip(group.input_ids.size)
        else:
            masks.extend(group.masks)
    return masks


def _versions(
    ids: Sequence[str], groups: Sequence[SampleGroup], settings: Logging
) -> list[dict[str, Any]]:
    """Return fields for the samples table: the weight version of each token."""
    notes = []
    for one in noted([len(each.lengths) for each in groups], settings):
        group = groups[one.item]
        start = int(group.lengths[: one.place].sum())
        first = start + int(group.prompt_lengths[one.place])
        last = min(start + int(group.lengths[one.place]), first + settings.sample_tokens)
        sampled_by = {
            "names": list(group.versions),
            "drawn_by": group.drawn_by[first:last].tolist(),
        }
        notes.append({"id": ids[one.item], "index": one.place, "versions": sampled_by})
    return notes


def _joined(arrays: Sequence[Array], dtype: torch.dtype) -> Tensor:
    return torch.cat(
        [torch.from_numpy(each).to(dtype) for each in arrays] or [torch.empty(0, dtype=dtype)]
    )


def add_masks(sample: SequenceSample, masks: SampledMasks) -> None:
    """Add the sampling masks of all tokens under ``input_ids``, in their order, to a sample."""
    rows = sample.lengths["input_ids"]
    ends = [0, *accumulate(masks.sizes)]
    cuts = pairwise(accumulate(chain.from_iterable(rows), initial=0))
    of_sequences = iter([ends[stop] - ends[start] for start, stop in cuts])
    lengths = {SIZES: rows, IDS: [[next(of_sequences) for _ in row] for row in rows]}
    device = sample.tensor("input_ids").device
    data = {
        key: torch.from_numpy(np.array(values, np.int32)).to(device)
        for key, values in ((SIZES, masks.sizes), (IDS, masks.ids))
    }
    sample.update_(SequenceSample(sample.ids, lengths, data=dict(data)))


def add_experts(sample: SequenceSample, experts: Sequence[Array]) -> None:
    """Add the experts of each sequence (int16, in any shape) to a sample."""
    sizes = iter([each.size for each in experts])
    lengths = {EXPERTS: [[next(sizes) for _ in row] for row in sample.lengths["input_ids"]]}
    flat = [each.reshape(-1) for each in experts]
    values = torch.from_numpy(np.concatenate([np.zeros(0, np.int16), *flat]))
    data = {EXPERTS: values.to(sample.tensor("input_ids").device)}
    sample.update_(SequenceSample(sample.ids, lengths, data=dict(data)))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over completions."""

    completions: int
    prompt: int
    """Number of tokens of the prompts, counted for each completion."""
    written: int
    """Number of tokens that the policy wrote."""
    read: int
    """Number of tokens of messages between the policy's turns."""
    finished: int
    turns: int
    failed: int = 0
    """Number of failed episodes."""
    tool_calls: int = 0
    tool_failures: int = 0

    @staticmethod
    def of_completions(ended: Sequence[Completion]) -> Totals:
        written = sum(sum(each.written) for each in ended)
        return Totals(
            completions=len(ended),
            prompt=sum(len(each.prompt) for each in ended),
            written=written,
            read=sum(len(each.tokens) for each in ended) - written,
            finished=sum(each.finished for each in ended),
            turns=sum(each.turns for each in ended),
            failed=sum(bool(each.failure) for each in ended),
            tool_calls=sum(each.tool_calls for each in ended),
            tool_failures=sum(each.tool_failures for each in ended),
        )

    @staticmethod
    def of_groups(groups: Sequence[SampleGroup]) -> Totals:
        prompt = _sum(each.prompt_lengths.sum() for each in groups)
        written = _sum((each.drawn_by >= 0).sum() for each in groups)
        return Totals(
            completions=_sum(each.lengths.size for each in groups),
            prompt=prompt,
            written=written,
            read=_sum(each.lengths.sum() for each in groups) - prompt - written,
            finished=_sum(each.finished.sum() for each in groups),
            turns=_sum(each.turns.sum() for each in groups),
            failed=_sum(each.failed.sum() for each in groups),
            tool_calls=_sum(each.tool_calls.sum() for each in groups),
            tool_failures=_sum(each.tool_failures.sum() for each in groups),
        )

    def stats(self, *, turns: bool, tools: bool) -> Stats:
        """Return the metrics.

        ``turns`` adds metrics of episodes that may have several turns. ``tools`` adds metrics of
        tool calls.
        """
        sums = {
            "response_length": self.written,
            "prompt_length": self.prompt,
            "finished": self.finished,
        }
        if turns:
            sums |= {
                "turns": self.turns,
                "context_length": self.read,
                "episode_failed": self.failed,
            }
        if tools:
            sums["tool_calls"] = self.tool_calls
        count = float(self.completions)
        stats = {name: (float(value), count) for name, value in sums.items()}
        if tools:
            stats["tool_failed"] = (float(self.tool_failures), float(self.tool_calls))
        return stats


def _sum(values: Iterable[Any]) -> int:
    return sum(map(int, values))
