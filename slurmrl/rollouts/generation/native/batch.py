"""Continuous batching: sequences begin and end between two calls of the model."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from itertools import count
from zlib import crc32

import torch
import torch.distributed as dist

from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.decoder import Decoder
from slurmrl.models.paged import cell_bytes
from slurmrl.models.parallel.split import Split
from slurmrl.rollouts.generation.base import Decode, GenerationRequest
from slurmrl.rollouts.generation.native.batch_schedule import Limits, PagePool, Schedule
from slurmrl.rollouts.generation.native.model_runner import ModelRunner, SampledStep
from slurmrl.rollouts.generation.native.sequence import Sequence, sequences_of

SHARE = 0.8
"""Fraction of a GPU's free memory for the cache. The rest is for activations and logits."""
GIB = 2**30


class ContinuousBatch:
    """Batch of requests that one decoder serves.

    All ranks of a split decoder call each method with the same arguments and get the same results.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        context: int | None,
        decode: Decode | None = None,
        masked: bool = True,
        turns: bool = True,
        overlap: bool | None = None,
    ) -> None:
        """``context`` is the maximum number of tokens of a sequence, including the prompt.

        If ``context`` is None, a request that may exceed the model's positions is rejected.
        ``decode`` is needed for stop strings. `ModelRunner` describes ``masked``. Without
        ``turns``, the cache does not grow to keep prefixes for later prompts. With ``overlap``
        (default: on a GPU), the tokens of a call are read while the next call runs.
        """
        limits = bounded(limits, decoder)
        self._pool = PagePool(limits.page_tokens, limits.pages, keep=turns)
        self._schedule = Schedule(limits, self._pool)
        self._runner = ModelRunner(decoder, limits, self._pool, masked=masked)
        self._limits, self._context, self._decode = limits, context, decode
        self._vocabulary = decoder.config.vocab_size
        self._check_length = decoder.config.check_length
        self._overlap = decoder.head_weight().is_cuda if overlap is None else overlap
        self._unread: list[SampledStep] = []
        self._ended: list[Sequence] = []
        self._arrivals = count()
        self.version = ""
        """Name of the current weight version."""
        self.sampled = 0
        """Total number of sampled tokens."""
        self.checksum = 0
        """Checksum of all sampled tokens, in their order."""
        self.read = 0
        """Total number of tokens that the model has processed."""

    @property
    def busy(self) -> bool:
        return self._schedule.busy or bool(self._ended)

    def add(self, request: GenerationRequest) -> list[Sequence]:
        """Queue a request; return its sequences, one for each key.

        Raises UsageError for a request that can never be served.
        """
        limit = self._limit(request)
        if request.options.experts and not self._runner.has_experts:
            raise UsageError(f"request {request.request_id}: the model has no experts to record")
        sequences = sequences_of(request, limit, self._arrivals, self._decode)
        if request.options.experts and not self._runner.records_experts:
            self._empty_cache()
            self._runner.record_experts()
        if sequences:
            sequences[0].followers = sequences[1:]
            self._schedule.add(sequences[0])
        return sequences

    def step(self) -> list[Sequence]:
        """Call the model once; return the sequences that have ended since the last call."""
        step = self._schedule.next(self._flush)
        sampled = self._runner.run(step, self.version) if step.chunks else None
        self.read += sum(chunk.tokens for chunk in step.chunks)
        self._flush()  # read the previous call's samples while this call runs
        if sampled is not None:
            self._unread.append(sampled)
        if not self._overlap:
            self._flush()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, sequences: list[Sequence]) -> None:
        """End sequences that have not ended yet; they keep their tokens."""
        self._flush()
        for sequence in sequences:
            sequence.followers = []
            if sequence.finish is None:
                sequence.finish = "aborted"
                self._schedule.remove(sequence)

    def renew(self, version: str, *, stale_cache: bool = False) -> None:
        """Continue with changed weights of the decoder.

        Sequences keep their tokens. The tokens are prefilled again. With ``stale_cache``, sequences
        also keep the keys and values of their tokens, but do not share them with others.
        """
        if stale_cache:
            self._flush()
            self._schedule.isolate()
            self._pool.forget()
        else:
            self._empty_cache()
        self._runner.renew()
        self.version = version

    def _empty_cache(self) -> None:
        """Preempt all sequences and forget the content of the cache."""
        self._flush()
        for sequence in list(self._schedule.running):
            self._schedule.preempt(sequence)
        self._pool.forget()

    def _limit(self, request: GenerationRequest) -> int:
        """Return the maximum number of tokens of the request's sequences.

        Raises UsageError for a request that can never be served.
        """
        prompt, name = len(request.prompt), f"request {request.request_id}"
        if not prompt:
            raise UsageError(f"{name}: an empty prompt cannot be continued")
        vocabulary = self._vocabulary
        for token in (min(request.prompt), max(request.prompt)):
            if not 0 <= token < vocabulary:
                raise UsageError(f"{name}: token {token} is not in the vocabulary of {vocabulary}")
        if self._context is not None and prompt >= self._context:
            raise UsageError(
                f"{name}: a prompt of {prompt} tokens leaves no room for a new token in the "
                f"model's context of {self._context} tokens"
            )
        wanted = prompt + request.options.max_new_tokens
        if self._context is None:
            self._check_length(wanted)
        limit = wanted if self._context is None else min(wanted, self._context)
        pages, page = self._limits.pages, self._limits.page_tokens
        if pages is not None and -(-limit // page) > pages:
            raise UsageError(
                f"{name}: a prompt of {prompt} tokens with up to {limit - prompt} new tokens does "
                f"not fit into the cache of {pages * page} tokens; allow fewer new tokens or "
                "a larger cache (rollout.episode.cache_gib)"
            )
        return limit

    def _flush(self) -> None:
        """Read all sampled tokens from the device."""
        unread, self._unread = self._unread, []
        for sampled in unread:
            self._process(sampled)

    def _process(self, sampled: SampledStep) -> None:
        """Add the samples of a call to their sequences; end the sequences that are complete."""
        tokens, logprobs, masks = sampled.read()
        self.checksum = crc32(array("q", tokens), self.checksum)
        if not all(map(math.isfinite, logprobs)):
            raise RunFailedError("the model's logits are not finite: its weights have diverged")
        for sequence, token, logprob, mask in zip(
            sampled.sequences, tokens, logprobs, masks, strict=True
        ):
            sequence.unread -= 1
            if sequence.finish is not None:
                continue  # with overlap, the sequence may have ended before this token
            sequence.take(token, logprob, sampled.version, mask, self._decode)
            self.sampled += 1
            if sequence.finish is not None:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Free the rows and pages of a sequence that has ended."""
        if sequence.request.options.experts:
            sequence.experts = self._runner.experts(sequence)
        # Exclude the last token, which the model need not process.
        sequence.stored = min(sequence.stored, len(sequence.tokens) - 1)
        self._schedule.store(sequence)
        self._schedule.remove(sequence)
        self._ended.append(sequence)


def bounded(limits: Limits, decoder: Decoder) -> Limits:
    """Return limits with ``cache_tokens``, computed from ``cache_bytes`` or the GPU's free memory.

    Limits that have ``cache_tokens``, or limits on a CPU without ``cache_bytes``, do not change.
    The ranks of a split decoder get the same limits: the GPU with the least free memory decides.

    Raises UsageError if not even one page fits.
    """
    device = decoder.head_weight().device
    if limits.cache_tokens is not None:
        return limits
    size, source = limits.cache_bytes, "the cache may use"
    if size is None and device.type == "cuda":
        free = _least(_free_bytes(device), decoder.split, device)
        size, source = int(SHARE * free), f"the free memory of {device} leaves"
    if size is None:
        return limits
    cell = cell_bytes(decoder)
    pages = (size - cell) // (cell * limits.page_tokens)  # One cell is spare.
    if pages < 1:
        needed = cell * (limits.page_tokens + 1) / GIB
        raise UsageError(
            f"a page of {limits.page_tokens} tokens of the key-value cache needs {needed:.3g} GiB, "
            f"but {source} {size / GIB:.3g} GiB: give the cache more memory, use fewer models on "
            "this device, or offload them"
        )
    return replace(limits, cache_tokens=pages * limits.page_tokens, cache_bytes=None)


def _least(size: int, split: Split, device: torch.device) -> int:
    """Return the minimum of ``size`` over all ranks of a decoder. Collective."""
    if split.whole:
        return size
    least = torch.tensor(size, device=device)
    for axis in (split.tensor, split.context):
        if axis.size > 1:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=axis.group)
    return int(least)


def _free_bytes(device: torch.device) -> int:
    """Return the number of bytes that torch can allocate now."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
