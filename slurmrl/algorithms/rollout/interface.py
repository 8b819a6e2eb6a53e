"""Completions of prompts: by the engine's own generation, or by episodes of several turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface, Stats
from slurmrl.algorithms.rollout.episodes import EpisodeGeneration
from slurmrl.algorithms.rollout.recorded import add_experts, add_support
from slurmrl.algorithms.rollout.sampling import (
    completions,
    generation_options,
    sampling_keys,
    sampling_seed,
)
from slurmrl.data.sample import SequenceSample
from slurmrl.data.tokenizer import decoding
from slurmrl.models.generate import GenerationOutput

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class RolloutInterface(Interface):
    def __init__(self) -> None:
        self._episodes: EpisodeGeneration | None = None

    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Each prompt's completions: prompt and completion as ``input_ids``, with ``prompt_mask``
        (True on what the policy did not write), ``logprobs`` under the sampling policy, and whether
        the completion ``finished`` with a stop token or stop string. If they are recorded, also
        what each token was drawn from, and the experts that read it (`data.support`)."""
        assert engine is not None
        if context.settings.config.rollout.episode.has_turns:
            if self._episodes is None:
                self._episodes = EpisodeGeneration(context)
            return self._episodes.generate(engine, sample, context)
        count, options = completions(context), generation_options(context)
        output = engine.generate(
            sample.only(["prompt_ids"]),
            options,
            seed=sampling_seed(context),
            step=context.step,
            keys=sampling_keys(sample.ids, count),
            decode=decoding(context.tokenizer),
        )
        made = _as_sample(sample.ids, output, count)
        if options.support:
            assert output.support is not None, "it was asked for"
            add_support(made, output.support)
        if options.experts:
            assert output.experts is not None, "they were asked for"
            add_experts(made, output.experts)
        return CallResult(made, _length_stats(output))

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
            self._episodes = None


def _as_sample(ids: tuple[str, ...], output: GenerationOutput, count: int) -> SequenceSample:
    """The completions as items of ``count`` sequences each."""
    lengths, prompt_lengths = output.lengths, output.prompt_lengths
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    prompt = torch.arange(len(output.tokens)) - starts < prompt_lengths.repeat_interleave(lengths)
    data: dict[str, Tensor | None] = {
        "input_ids": output.tokens,
        "prompt_mask": prompt.to(output.tokens.device),
        "logprobs": output.logprobs,
    }
    rows = lengths.view(len(ids), count).tolist()
    return SequenceSample.grouped(rows, ids, data, per_sequence={"finished": output.finished})


def _length_stats(output: GenerationOutput) -> Stats:
    count = float(len(output.lengths))
    prompts = float(output.prompt_lengths.sum())
    return {
        "response_length": (float(output.lengths.sum()) - prompts, count),
        "prompt_length": (prompts, count),
        "finished": (float(output.finished.sum()), count),
    }
