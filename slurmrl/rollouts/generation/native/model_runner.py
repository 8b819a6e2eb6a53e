"""Run a step of the scheduler: make tensors, call the model, sample tokens.

D is the number of samples of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from slurmrl.models.decoder import Decoder
from slurmrl.models.experts import UNKNOWN
from slurmrl.models.paged import PagedCall, PagedDecoder
from slurmrl.rollouts.generation.native.batch_schedule import Limits, PagePool, Step, TokenChunk
from slurmrl.rollouts.generation.native.decode import (
    UNREAD,
    DecodeStep,
    RowInput,
    RowState,
    capture_for,
)
from slurmrl.rollouts.generation.native.sequence import SamplingKey, Sequence
from slurmrl.tensors.layout import Array
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.sampling import NONE, Sampled, joined, sample, stream_uniform

GROWTH = 1.5
"""Factor by which the number of pages grows."""


@dataclass(frozen=True)
class SampledStep:
    """The tokens that a call sampled, still on the device."""

    sequences: list[Sequence]
    samples: Sampled
    """The samples [D]. `ModelRunner` describes their log-probabilities."""
    version: str
    copied: torch.cuda.Event | None
    """Event after the copy to host memory; None if the samples are already there."""

    def read(self) -> tuple[list[int], list[float], list[list[int]]]:
        """Wait for the tokens; return them with their log-probabilities and sampling masks."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, logprobs, masks = self.samples
        if masks is None:
            return tokens.tolist(), logprobs.tolist(), [[]] * len(tokens)
        kept = masks != NONE
        ends = [0, *accumulate(kept.sum(-1).tolist())]
        ids = masks[kept].tolist()
        split = [ids[begin:end] for begin, end in pairwise(ends)]
        return tokens.tolist(), logprobs.tolist(), split


class ModelRunner:
    """Runs calls of a decoder, with its cache and its rows."""

    def __init__(self, decoder: Decoder, limits: Limits, pool: PagePool, *, masked: bool) -> None:
        """``masked`` selects the distribution of the log-probabilities.

        With ``masked``, log-probabilities are over the tokens that top-k and top-p keep. Otherwise,
        log-probabilities are over all tokens, as in training.
        """
        self._limits, self._pool, self._masked = limits, pool, masked
        self._device = decoder.head_weight().device
        self._decoder = PagedDecoder(decoder, limits.page_tokens)
        self._rows = RowState(limits.rows, self._device)
        self._decode = DecodeStep(
            self._decoder, self._rows, masked=masked, capture=capture_for(self._decoder)
        )

    def renew(self) -> None:
        """Use the current weights of the decoder."""
        self._decoder.renew()
        if self._decoder.copies_weights:
            self._decode.forget()

    @torch.no_grad()
    def run(self, step: Step, version: str) -> SampledStep | None:
        """Process the step's tokens, and sample the next token of each chunk that ``samples``.

        Return None if no chunk samples. The host does not wait for a GPU.
        """
        self._grow()
        if _only_decodes(step):
            return self._decoded([chunk.sequence for chunk in step.chunks], version)
        fresh = sorted((c for c in step.chunks if not c.begin), key=lambda c: c.tokens)
        chunks = fresh + [chunk for chunk in step.chunks if chunk.begin]
        apart = len(fresh) if self._decoder.reads_beginnings_apart else 0
        logits = self._logits(chunks, apart)
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        places = {id(sequence): place for place, sequence in enumerate(sequences)}
        if step.forks:
            of_leaders = [places[id(leader)] for leader, _ in step.forks]
            sequences = sequences + [follower for _, follower in step.forks]
            rows = torch.tensor([*range(len(places)), *of_leaders])
            logits = logits[upload([rows], self._device)[0]]
        sampled = self._sample(sequences, logits, version) if sequences else None
        if step.copies:
            sources, targets = zip(*step.copies, strict=True)
            pages = upload([torch.tensor(sources), torch.tensor(targets)], self._device)
            self._decoder.cache.copy_pages(*pages)
        return sampled

    @property
    def has_experts(self) -> bool:
        return self._decoder.cache.has_experts

    @property
    def records_experts(self) -> bool:
        return bool(self._decoder.cache.experts)

    def record_experts(self) -> None:
        """Record experts from now on. Tokens that are already in the cache have no record."""
        self._decoder.cache.record_experts()
        self._decode.forget()

    def experts(self, sequence: Sequence) -> Array:
        """Return the experts of an ended sequence in the form of `Completion.experts`."""
        page, read = self._limits.page_tokens, len(sequence.tokens) - 1
        places = torch.arange(read)
        cells = torch.tensor(sequence.pages)[places // page] * page + places % page
        (index,) = upload([cells], self._device)
        rows = torch.cat([slab[index] for slab in self._decoder.cache.experts], -1)
        return F.pad(rows, (0, 0, 0, 1), value=UNKNOWN).cpu().numpy()

    def _grow(self) -> None:
        """Allocate memory for all pages that the pool has used."""
        if self._pool.made <= self._decoder.cache.pages:
            return
        grown = int(self._pool.made * GROWTH)
        most = self._limits.pages
        self._decoder.cache.grow(grown if most is None else min(grown, most))
        self._decode.forget()

    def _decoded(self, sequences: list[Sequence], version: str) -> SampledStep:
        """Process the last token of each sequence and sample the next token."""
        inputs = []
        for sequence in sequences:
            position = sequence.length - 1
            row, slot = self._rows.row(sequence), self._slot(sequence, position)
            token = sequence.tokens[position] if not sequence.unread else UNREAD
            inputs.append(RowInput(token, slot, position, row, sequence.stream))
        self._write_tables()
        samples = self._decode.run(inputs, sequences[0].sampling_key, sequences[0].banned)
        return self._step_of(sequences, samples, version)

    def _slot(self, sequence: Sequence, position: int) -> int:
        page = self._limits.page_tokens
        return sequence.pages[position // page] * page + position % page

    def _write_tables(self) -> None:
        if self._rows.write():
            self._decode.forget()

    def _logits(self, chunks: list[TokenChunk], fresh: int) -> Tensor:
        """Return the logits [number of chunks that sample, V].

        The first ``fresh`` chunks begin at position 0 and are prefilled separately.
        """
        page = self._limits.page_tokens
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        ends, last = [0], []
        for sequence, begin, count, ready in chunks:
            own, pages = self._rows.row(sequence), sequence.pages
            end = begin + count
            known = sequence.tokens[begin:end]
            if len(known) < count:  # the last token is only on the device
                known.append(UNREAD)
            ids += known
            slots += [pages[n // page] * page + n % page for n in range(begin, end)]
            positions += range(begin, end)
            rows += [own] * count
            ends.append(len(ids))
            if ready:
                last.append(len(ids) - 1)
        first = ends[fresh]
        host = [torch.tensor(x, dtype=torch.int64) for x in (ids, slots, positions, rows, last)]
        input_ids, slot, position, row, ending = upload(host, self._device)
        self._write_tables()
        call = PagedCall(
            slots=slot,
            fresh=_packing(ends[: fresh + 1]),
            fresh_tokens=first,
            tables=self._rows.tables,
            rows=row[first:],
            lengths=position[first:] + 1,
            longest=max(positions[first:], default=0) + 1,
            chunk=max((chunk.tokens for chunk in chunks[fresh:]), default=1),
        )
        input_ids = self._rows.tokens(input_ids, row)
        return self._decoder.logits(input_ids, position, call, ending)

    def _sample(self, sequences: list[Sequence], logits: Tensor, version: str) -> SampledStep:
        """Sample a token for each sequence from logits [D, V]."""
        groups: dict[tuple[SamplingKey, tuple[int, ...]], list[int]] = {}
        for place, sequence in enumerate(sequences):
            groups.setdefault((sequence.sampling_key, sequence.banned), []).append(place)
        parts = [self._sampled(sequences, logits, *group) for group in groups.items()]
        samples = joined(parts)
        order = torch.tensor([place for places in groups.values() for place in places])
        own = torch.tensor([sequence.row for sequence in sequences], dtype=torch.int64)
        back, rows = upload([order.argsort(), own], self._device)
        if len(groups) > 1:
            samples = samples.each(lambda values: values[back])
        self._rows.last.index_copy_(0, rows, samples.tokens)
        return self._step_of(sequences, samples, version)

    def _sampled(
        self,
        sequences: list[Sequence],
        logits: Tensor,
        settings: tuple[SamplingKey, tuple[int, ...]],
        places: list[int],
    ) -> Sampled:
        """Sample a token for each sequence with an index in ``places``.

        These sequences have the same sampling key and the same banned stop tokens.
        """
        group = [sequences[place] for place in places]
        (temperature, top_k, top_p, greedy, record), banned = settings
        host = (
            torch.tensor([sequence.stream for sequence in group], dtype=torch.int64),
            torch.tensor([sequence.length for sequence in group], dtype=torch.int64),
            torch.tensor(banned, dtype=torch.int64),
            torch.tensor(places, dtype=torch.int64),
        )
        streams, positions, stops, index = upload(host, self._device)
        return sample(
            logits if len(places) == len(sequences) else logits[index],
            stream_uniform(streams, positions),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            banned=stops if banned else None,
            masked=self._masked,
            record=record,
        )

    def _step_of(self, sequences: list[Sequence], samples: Sampled, version: str) -> SampledStep:
        """Start to copy the samples to host memory, before the next call may overwrite them."""
        for sequence in sequences:
            sequence.unread += 1
        if self._device.type != "cuda":
            return SampledStep(sequences, samples.each(torch.clone), version, None)
        host = samples.each(_on_its_way)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return SampledStep(sequences, host, version, copied)


def _on_its_way(values: Tensor) -> Tensor:
    """Start a copy to host memory without waiting for it."""
    copy = torch.empty_like(values, device="cpu", pin_memory=True)
    return copy.copy_(values, non_blocking=True)


def _only_decodes(step: Step) -> bool:
    """Return whether a call reads only last tokens, of rows that all sample in the same way."""
    first = step.chunks[0].sequence
    return not step.forks and all(
        chunk.samples
        and chunk.tokens == 1
        and chunk.begin
        and chunk.sequence.sampling_key == first.sampling_key
        and chunk.sequence.banned == first.banned
        for chunk in step.chunks
    )


def _packing(ends: list[int]) -> Packing:
    lengths = [stop - start for start, stop in pairwise(ends)]
    return Packing(torch.tensor(ends, dtype=torch.int32), max(lengths, default=0))
