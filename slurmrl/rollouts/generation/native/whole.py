"""Generation of a whole batch by continuous batching.

T packed tokens, P prompts, S sequences.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from slurmrl.data.support import SampledSupport
from slurmrl.models.decoder import Decoder
from slurmrl.models.generate import (
    CHECK_TOKENS,
    Compare,
    GenerationOptions,
    GenerationOutput,
    completions_of_each,
)
from slurmrl.rollouts.generation.base import GenerationRequest
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.schedule import Limits
from slurmrl.rollouts.generation.native.sequence import Sequence
from slurmrl.rollouts.generation.native.stops import Decode
from slurmrl.tensors.ops.arguments import wide


def generate_by_requests(
    decoder: Decoder,
    input_ids: Tensor,
    cu_seqlens: Tensor,
    options: GenerationOptions,
    *,
    seed: int,
    step: int,
    keys: Tensor,
    limits: Limits,
    compare: Compare | None = None,
    decode: Decode | None = None,
) -> GenerationOutput:
    """The same as `models.generate.generate`, by requests that one decoder serves together. With
    ``decode`` also for stop strings.

    Nothing is kept between two calls, so a call with the same arguments, weights and limits gives
    the same bits.
    """
    lengths: list[int] = cu_seqlens.diff().tolist()
    each = completions_of_each(lengths, keys)
    if lengths:
        decoder.config.check_length(max(lengths) + options.max_new_tokens)
    batch = ContinuousBatch(
        decoder, limits, context=None, decode=decode, support=options.support, turns=False
    )
    tokens, streams = input_ids.tolist(), keys.tolist()
    sequences: list[Sequence] = []
    for prompt, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        request = GenerationRequest(
            request_id=str(prompt),
            prompt=tuple(tokens[start:stop]),
            keys=tuple(streams[prompt * each : (prompt + 1) * each]),
            seed=seed,
            step=step,
            options=options,
        )
        sequences += batch.add(request)
    every = CHECK_TOKENS[input_ids.device.type]
    steps = 0
    while batch.busy:
        batch.step()
        steps += 1
        if compare is not None and (steps % every == 0 or not batch.busy):
            compare(batch.drawn, batch.checksum)
    output = _output(sequences, input_ids.device, wide(decoder.head_weight().dtype))
    if options.support:
        output = replace(output, support=_support(sequences))
    if options.experts:
        experts = [sequence.experts for sequence in sequences if sequence.experts is not None]
        output = replace(output, experts=experts)
    return output


def _output(
    sequences: list[Sequence], device: torch.device, dtype: torch.dtype
) -> GenerationOutput:
    prompts = [len(sequence.request.prompt) for sequence in sequences]
    logprobs = [
        value
        for prompt, sequence in zip(prompts, sequences, strict=True)
        for part in ([0.0] * prompt, sequence.logprobs)
        for value in part
    ]
    tokens = [token for sequence in sequences for token in sequence.tokens]
    return GenerationOutput(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        lengths=torch.tensor([len(each.tokens) for each in sequences], dtype=torch.int64),
        prompt_lengths=torch.tensor(prompts, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=dtype, device=device),
        finished=torch.tensor([each.finish == "stop" for each in sequences], dtype=torch.bool),
    )


def _support(sequences: list[Sequence]) -> SampledSupport:
    """Of all tokens, those of the prompts included."""
    support = SampledSupport()
    for sequence in sequences:
        support.skip(len(sequence.request.prompt))
        support.extend(sequence.support)
    return support
