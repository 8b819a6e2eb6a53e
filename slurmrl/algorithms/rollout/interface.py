"""Completions of prompts by the engine's own generation."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface, Stats
from slurmrl.data.sample import SequenceSample
from slurmrl.models.generate import GenerationOptions, GenerationOutput

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine


class RolloutInterface(Interface):
    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Each prompt's completions: prompt and completion as ``input_ids``, with ``prompt_mask``,
        ``logprobs`` under the sampling policy, and whether the completion ``finished`` with a stop
        token."""
        assert engine is not None
        count = completions(context)
        output = engine.generate(
            sample.only(["prompt_ids"]),
            generation_options(context),
            seed=evaluation_seed(context.seed) if context.evaluation else context.seed,
            step=context.step,
            keys=sampling_keys(sample.ids, count),
        )
        return CallResult(_as_sample(sample.ids, output, count), _length_stats(output))


def completions(context: CallContext) -> int:
    """Completions of each prompt."""
    rollout, evaluation = context.settings.config.rollout, context.settings.config.evaluation
    return evaluation.n if context.evaluation and evaluation is not None else rollout.n


def generation_options(context: CallContext) -> GenerationOptions:
    """The settings of the rollout or of the evaluation, which uses neither top-k nor top-p."""
    rollout, evaluation = context.settings.config.rollout, context.settings.config.evaluation
    if context.evaluation and evaluation is not None:
        return GenerationOptions(
            max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
            temperature=evaluation.temperature,
            greedy=evaluation.greedy,
            stop_token_ids=context.stop_token_ids,
        )
    return GenerationOptions(
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=rollout.greedy,
        stop_token_ids=context.stop_token_ids,
    )


def sampling_keys(ids: tuple[str, ...], completions: int = 1) -> Tensor:
    """[S] int64, a stable hash for each completion of each sample id. The tokens drawn for a
    completion depend on it, and not on the batch, the rank or the number of completions."""
    names = (_stream(name, place) for name in ids for place in range(completions))
    return torch.tensor([_hash64(name) for name in names], dtype=torch.int64)


def _stream(name: str, place: int) -> str:
    """The first completion of a sample has the sample's own stream. (A sample id ends with
    ``@<epoch>``, so no other one can equal the name of a completion.)"""
    return f"{name}#{place}" if place else name


def evaluation_seed(seed: int) -> int:
    """The seed of the evaluation's own random stream, in 0..2^63-1."""
    return _hash64(f"eval {seed}") & (2**63 - 1)


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


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
