"""Decode calls, which read one token of each row and sample the next token.

The inputs of these calls have few shapes, so a GPU repeats the calls as CUDA graphs. For one token
of all rows, the host then starts one graph, however many layers there are. Other devices compute
the call directly.

B is the number of rows of a call with padding, R the number of rows of a batch, N the number of
pages of a row and T the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from slurmrl import log
from slurmrl.models.paged import PagedCall, PagedDecoder
from slurmrl.rollouts.generation.native.sequence import SamplingKey, Sequence
from slurmrl.tensors.ops.arguments import upload
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.sampling import Sampled, sample, stream_uniform

logger = log.get(__name__)

LEAST_CELLS = 1024
"""Minimum length in cells of a graph. Other lengths are this length times a power of 2."""
UNREAD = -1
"""Placeholder of a row's last token while the host has not read this token."""


class RowInput(NamedTuple):
    """Input of a call for one row."""

    token: int
    """Last token of the row, or `UNREAD`."""
    slot: int
    """Cache cell for the token's key and value."""
    position: int
    row: int
    stream: int


class DecodeShape(NamedTuple):
    """Fixed properties of a graph."""

    rows: int
    longest: int
    """Upper bound of the number of cells that a row attends to."""
    sampling_key: SamplingKey
    banned: tuple[int, ...]


class DecodeGraph(Protocol):
    samples: Sampled
    """Result, in the same memory after every replay."""

    def replay(self) -> None:
        """Run the graph with the current content of the inputs' memory."""
        ...


Capture = Callable[[Callable[[], Sampled]], DecodeGraph]
"""Function that makes a CUDA graph of a function whose tensors keep their place in memory."""


class CUDAGraphs:
    """Captures graphs that share memory, because only one graph runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Sampled]) -> DecodeGraph:
        return _CUDAGraph(compute, self._pool)


class _CUDAGraph:
    def __init__(self, compute: Callable[[], Sampled], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the process may call CUDA during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.samples = compute()

    def replay(self) -> None:
        self._graph.replay()


def capture_for(decoder: PagedDecoder) -> Capture | None:
    """Return a function that captures a decoder's calls; None to compute them directly.

    Calls are not captured on CPUs, for split decoders, or with experts. With experts, the host
    reads the number of tokens of each expert.
    """
    model = decoder.decoder
    if not model.head_weight().is_cuda or not model.split.whole or model.config.moe is not None:
        return None
    return CUDAGraphs()


class DecodeStep:
    """The decode calls of one decoder."""

    def __init__(
        self, decoder: PagedDecoder, state: RowState, *, masked: bool, capture: Capture | None
    ) -> None:
        """`ModelRunner` describes ``masked``."""
        self._decoder, self._state, self._masked = decoder, state, masked
        self._capture, self._device = capture, state.last.device
        self._inputs: dict[int, Tensor] = {}
        """Input memory of the graphs for each B: the columns of ``RowInput`` as int64 [5, B]."""
        self._banned: dict[tuple[int, ...], Tensor] = {}
        self._graphs: dict[DecodeShape, DecodeGraph | None] = {}
        """Graph of each shape; None after the first, direct call, which initializes libraries."""

    def forget(self) -> None:
        """Drop all graphs, because their inputs or outputs have moved in memory."""
        self._graphs = dict.fromkeys(self._graphs)

    def run(
        self, inputs: list[RowInput], sampling_key: SamplingKey, banned: tuple[int, ...]
    ) -> Sampled:
        """Read a token of each row and sample the next token. The next call can read the samples.

        The results are valid until the next call. The host waits for a GPU only when a graph is
        made.
        """
        shape = self._shape(inputs, sampling_key, banned)
        more = shape.rows - len(inputs)
        spare = RowInput(0, self._decoder.cache.spare, 0, self._state.spare, 0)
        rows = torch.tensor([*inputs, *[spare] * more], dtype=torch.int64)
        samples = self._replayed(rows.t().contiguous(), shape)
        return samples.each(lambda values: values[: len(inputs)])

    def _shape(
        self, inputs: list[RowInput], sampling_key: SamplingKey, banned: tuple[int, ...]
    ) -> DecodeShape:
        count, longest = len(inputs), 1 + max(each.position for each in inputs)
        if self._capture is None:
            return DecodeShape(count, longest, sampling_key, banned)
        rows = min(_power(count), self._state.spare)
        return DecodeShape(rows, max(LEAST_CELLS, _power(longest)), sampling_key, banned)

    def _replayed(self, columns: Tensor, shape: DecodeShape) -> Sampled:
        if shape.banned not in self._banned:
            stops = torch.tensor(shape.banned, dtype=torch.int64)
            (self._banned[shape.banned],) = upload([stops], self._device)
        if self._capture is None:
            parts = upload(columns.unbind(), self._device)
            return self._compute(parts, shape)
        inputs = self._placed(columns)
        if shape not in self._graphs:
            self._graphs[shape] = None
            return self._compute(inputs, shape)
        graph = self._graphs[shape]
        if graph is None:
            return self._captured(self._capture, inputs, shape)
        graph.replay()
        return graph.samples

    def _captured(
        self, capture: Capture, inputs: tuple[Tensor, ...], shape: DecodeShape
    ) -> Sampled:
        """Make the graph of a shape, and return the samples of its first replay.

        If the graph cannot be made, or its first replay samples other tokens than a direct call,
        compute all later calls directly.
        """
        last = self._state.last.clone()
        samples = self._compute(inputs, shape)
        after = self._state.last.clone()
        self._state.last.copy_(last)
        try:
            graph = capture(lambda: self._compute(inputs, shape))
            graph.replay()
            if torch.equal(graph.samples.tokens, samples.tokens):
                self._graphs[shape] = graph
                return graph.samples
            reason = "a graph samples other tokens than a direct call"
        except RuntimeError as error:
            reason = str(error)
        logger.warning("decode runs without CUDA graphs, which is slower: %s", reason)
        self._capture = None
        self._graphs.clear()
        self._state.last.copy_(after)
        return samples

    def _placed(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Copy the inputs into the memory that graphs for this number of rows read."""
        rows = columns.shape[1]
        if rows not in self._inputs:
            self._inputs[rows] = torch.empty(columns.shape, dtype=torch.int64, device=self._device)
        host = torch.empty(columns.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._inputs[rows].copy_(host.copy_(columns), non_blocking=True)
        return self._inputs[rows].unbind()

    def _compute(self, inputs: tuple[Tensor, ...], shape: DecodeShape) -> Sampled:
        ids, slots, positions, rows, streams = inputs
        lengths = positions + 1
        call = PagedCall(
            slots=slots,
            fresh=Packing(torch.zeros(1, dtype=torch.int32), 0),
            fresh_tokens=0,
            tables=self._state.tables,
            rows=rows,
            lengths=lengths,
            longest=shape.longest,
        )
        ids = self._state.tokens(ids, rows)
        logits = self._decoder.logits(ids, positions, call, None)
        temperature, top_k, top_p, greedy, record = shape.sampling_key
        sampled = sample(
            logits,
            stream_uniform(streams, lengths),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            banned=self._banned[shape.banned] if shape.banned else None,
            masked=self._masked,
            record=record,
        )
        self._state.last.index_copy_(0, rows, sampled.tokens)
        return sampled


def _power(number: int) -> int:
    """Return the smallest power of 2 that is at least ``number``."""
    return 1 << (number - 1).bit_length()


class RowState:
    """The page tables and the last tokens of all rows.

    The ``spare`` row after all rows is for padding, which belongs to no sequence.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.spare = rows
        self.tables = torch.zeros((rows + 1, 1), dtype=torch.int64, device=device)
        """Pages of each row: int64 [R + 1, N]."""
        self.last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The token that each row sampled last: int64 [R + 1]."""
        self._new: list[tuple[int, int, int]] = []
        """Pages that are missing in the tables, as (row, place, page)."""

    def row(self, sequence: Sequence) -> int:
        """Return the row of a sequence. The next ``write`` adds its new pages to the tables."""
        row, pages = sequence.row, sequence.pages
        assert row is not None
        if sequence.in_table < len(pages):
            self._new += [(row, n, pages[n]) for n in range(sequence.in_table, len(pages))]
            sequence.in_table = len(pages)
        return row

    def write(self) -> bool:
        """Write new pages into the tables; return whether the tables have moved in memory."""
        if not self._new:
            return False
        new, self._new = torch.tensor(self._new, dtype=torch.int64), []
        missing = int(new[:, 1].max()) + 1 - self.tables.shape[1]
        if missing > 0:
            self.tables = pad(self.tables, (0, max(missing, self.tables.shape[1])))
        places = new[:, 0] * self.tables.shape[1] + new[:, 1]
        places, pages = upload([places, new[:, 2]], self.tables.device)
        self.tables.view(-1).index_copy_(0, places, pages)
        return missing > 0

    def tokens(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return ``ids`` [T], with each `UNREAD` replaced by the last token of its row."""
        return torch.where(ids == UNREAD, self.last[rows], ids)
