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
    from slurmrl.engines.base import RolloutEngine


class RolloutInterface(Interface):
    def generate(
        self, engine: RolloutEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Prompt and completion as ``input_ids``, with ``prompt_mask``, ``logprobs`` under the
        sampling policy, and whether the completion ``finished`` with a stop token."""
        assert engine is not None
        output = engine.generate(
            sample.only(["prompt_ids"]),
            generation_options(context),
            seed=evaluation_seed(context.seed) if context.evaluation else context.seed,
            step=context.step,
            keys=sampling_keys(sample.ids),
        )
        return CallResult(_as_sample(sample.ids, output), _length_stats(output))


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


def sampling_keys(ids: tuple[str, ...]) -> Tensor:
    """[S] int64, a stable hash of each sample id: the tokens drawn for a sample depend on its hash,
    not on the batch or the rank."""
    return torch.tensor([_hash64(name) for name in ids], dtype=torch.int64)


def evaluation_seed(seed: int) -> int:
    """The seed of the evaluation's own random stream, in 0..2^63-1."""
    return _hash64(f"eval {seed}") & (2**63 - 1)


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _as_sample(ids: tuple[str, ...], output: GenerationOutput) -> SequenceSample:
    lengths, prompt_lengths = output.lengths, output.prompt_lengths
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    prompt = torch.arange(len(output.tokens)) - starts < prompt_lengths.repeat_interleave(lengths)
    data: dict[str, Tensor | None] = {
        "input_ids": output.tokens,
        "prompt_mask": prompt.to(output.tokens.device),
        "logprobs": output.logprobs,
        "finished": output.finished,
    }
    return SequenceSample.from_default(lengths.tolist(), ids, data)


def _length_stats(output: GenerationOutput) -> Stats:
    count = float(len(output.lengths))
    prompts = float(output.prompt_lengths.sum())
    return {
        "response_length": (float(output.lengths.sum()) - prompts, count),
        "prompt_length": (prompts, count),
        "finished": (float(output.finished.sum()), count),
    }
