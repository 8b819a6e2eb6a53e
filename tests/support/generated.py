"""Whole batches of prompts, generated through the contract of request engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.data.meta import SampledMasks
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import GenerateEngine, ServingOptions
from slurmrl.engines.hf_batch import HFRollout
from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import (
    Decode,
    GenerationOptions,
    GenerationRequest,
    RolloutEngine,
)
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.tensors.layout import Array


@dataclass(frozen=True)
class GenerationOutput:
    """Prompts with completions, in the order of prompts; completions of a prompt are adjacent."""

    tokens: Tensor
    """[T] packed: each prompt followed by its new tokens."""
    lengths: Tensor
    """[S] int64: number of prompt tokens and new tokens."""
    prompt_lengths: Tensor
    """[S] int64: number of prompt tokens."""
    logprobs: Tensor
    """[T]: log-probabilities, 0 on prompt tokens."""
    finished: Tensor
    """[S] bool: ended with a stop token or stop string."""
    masks: SampledMasks | None = None
    """Sampling masks of all T tokens; empty on prompt tokens."""
    experts: list[Array] | None = None
    """Experts of the tokens of each sequence."""


def generated(
    engine: GenerateEngine,
    sample: SequenceSample,
    options: GenerationOptions,
    *,
    seed: int,
    step: int,
    keys: Tensor,
    decode: Decode | None = None,
) -> GenerationOutput:
    """Return completions of the prompts of ``sample``, on all ranks that have it. Collective."""
    ids, ends = sample.tensor("prompt_ids"), sample.cu_seqlens("prompt_ids")
    asked = requests(ids, ends, options, seed=seed, step=step, keys=keys)
    how = ServingOptions(decode=decode, turns=False, masked=options.masks)
    found: list[Any] = [None]
    with engine.serving("1.0", how) as served:
        if served is not None:
            found = [asyncio.run(_answers(served, asked))]
    if how_many(engine) > 1:
        dist.broadcast_object_list(found, group=engine.context.group("data"), group_src=0)
    return output(asked, found[0], options, ids.device, torch.float32)


def how_many(engine: GenerateEngine) -> int:
    """Return the number of ranks that have the same sample."""
    groups = getattr(engine.context, "groups", {})
    return dist.get_world_size(engine.context.group("data")) if "data" in groups else 1


def generate(
    model: Any,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    options: GenerationOptions,
    *,
    seed: int,
    step: int,
    keys: Tensor,
    limits: Limits | None = None,
    prefill_tokens: int | None = None,
) -> GenerationOutput:
    """Generate completions by a model without an engine. Completions of a prompt are adjacent."""
    asked = requests(input_ids, cu_seqlens, options, seed=seed, step=step, keys=keys)
    tokens = prefill_tokens or len(input_ids)

    async def run() -> list[tuple[Completion, ...]]:
        if not isinstance(model, Decoder):
            return await _answers(HFRollout(model, "1.0", tokens, masked=options.masks), asked)
        how: dict[str, Any] = {"own": False, "turns": False, "masked": options.masks}
        sizes = limits or Limits(step_tokens=max(256, prefill_tokens or 2048))
        return await _answers(NativeRollout(model, limits=sizes, version="1.0", **how), asked)

    dtype = next(model.parameters()).dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return output(asked, asyncio.run(run()), options, input_ids.device, wide)


def requests(
    input_ids: Tensor,
    cu_seqlens: Tensor,
    options: GenerationOptions,
    *,
    seed: int,
    step: int,
    keys: Tensor,
) -> list[GenerationRequest]:
    tokens, streams = input_ids.tolist(), keys.tolist()
    cuts = list(pairwise(cu_seqlens.tolist()))
    count = len(streams) // max(len(cuts), 1)
    return [
        GenerationRequest(
            request_id=f"{number:07}",
            prompt=tuple(tokens[start:stop]),
            keys=tuple(streams[number * count : (number + 1) * count]),
            seed=seed,
            step=step,
            options=options,
        )
        for number, (start, stop) in enumerate(cuts)
    ]


def request(
    name: str, length: int, *keys: int, first: int = 4, **options: Any
) -> GenerationRequest:
    """Return a request with a prompt of this length. Its token ids start at ``first``."""
    return GenerationRequest(
        request_id=name,
        prompt=tuple(first + (7 * n) % 13 for n in range(length)),
        keys=keys,
        seed=1,
        step=2,
        options=GenerationOptions(**{"max_new_tokens": 20, "temperature": 0.8, **options}),
    )


def letters(tokens: Any) -> str:
    """Return the text of tokens, one to three letters for each."""
    return "".join("abcdefghij"[token % 10] * (1 + token % 3) for token in tokens)


async def _answers(
    engine: RolloutEngine, asked: Sequence[GenerationRequest]
) -> list[tuple[Completion, ...]]:
    return await asyncio.gather(*map(engine.submit, asked))


def output(
    asked: Sequence[GenerationRequest],
    answers: Sequence[Sequence[Completion]],
    options: GenerationOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> GenerationOutput:
    rows = [
        (request.prompt, made)
        for request, answer in zip(asked, answers, strict=True)
        for made in answer
    ]
    masks = SampledMasks()
    for prompt, made in rows:
        masks.skip(len(prompt))
        masks.extend(made.masks or SampledMasks())
    sizes = torch.tensor([[len(p) + len(made.tokens), len(p)] for p, made in rows]).view(-1, 2)
    logprobs = [value for p, made in rows for value in (*[0.0] * len(p), *made.logprobs)]
    return GenerationOutput(
        tokens=torch.tensor(
            [token for p, made in rows for token in (*p, *made.tokens)],
            dtype=torch.int64,
            device=device,
        ),
        lengths=sizes[:, 0].long().contiguous(),
        prompt_lengths=sizes[:, 1].long().contiguous(),
        logprobs=torch.tensor(logprobs, dtype=dtype, device=device),
        finished=torch.tensor([made.finish == "stop" for _, made in rows], dtype=torch.bool),
        masks=masks if options.masks else None,
        experts=[made.experts for _, made in rows if made.experts is not None]
        if options.experts
        else None,
    )
