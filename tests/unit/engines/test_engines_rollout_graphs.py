"""Decoding of the native engine with static buffers, as CUDA graphs replay it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from slurmrl.models import inference as inference_module
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder
from slurmrl.rollouts.generation.base import GenerationOptions, GenerationRequest
from slurmrl.rollouts.generation.native import decode as decode_module
from slurmrl.rollouts.generation.native import model_runner as runner_module
from slurmrl.rollouts.generation.native.batch import ContinuousBatch
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.sequence import Sequence
from slurmrl.tensors.ops.sampling import Sampled
from tests.support.recorded_graphs import RecordedGraphs
from tests.unit.models.conftest import BASE, ODD, random_decoder

OPTIONS = GenerationOptions(max_new_tokens=40, temperature=0.8, stop_token_ids=(3, 11))
TIGHT = Limits(rows=8, step_tokens=16, cache_tokens=64, page_tokens=4)
"""Rows are preempted."""


@dataclass
class Run:
    """A decoder's batch, and a record of its calls."""

    batch: ContinuousBatch
    decoder: Decoder
    graphs: RecordedGraphs | None

    def add(self, count: int, options: GenerationOptions = OPTIONS, first: int = 0) -> Any:
        generator = torch.Generator().manual_seed(first)
        added: list[Sequence] = []
        for number in range(first, first + count):
            length = 1 + int(torch.randint(9, (), generator=generator))
            prompt = tuple(torch.randint(4, 37, (length,), generator=generator).tolist())
            keys = (2 * number, 2 * number + 1)
            request = GenerationRequest(
                request_id=str(number), prompt=prompt, keys=keys, seed=1, step=2, options=options
            )
            added += self.batch.add(request)
        return added

    def finish(self) -> None:
        for _ in range(2000):
            if not self.batch.busy:
                return
            self.batch.step()
        raise AssertionError("requests do not end")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(decode_module, "LEAST_CELLS", 8)  # rows grow out of their graphs

    def make(
        name: str, limits: Limits, *, overlap: bool, graphs: bool, kind: Any = RecordedGraphs
    ) -> Run:
        recorded = kind() if graphs else None
        monkeypatch.setattr(runner_module, "capture_for", lambda decoder: recorded)
        decoder = random_decoder(ModelConfig.from_hf({**BASE, **ODD[name]}), 0)
        batch = ContinuousBatch(decoder, limits, context=None, overlap=overlap)
        batch.renew("1")
        return Run(batch, decoder, recorded)

    return make


def same(found: list[Sequence], wanted: list[Sequence]) -> None:
    """Check that tokens are equal; products of padded rows may differ in rounding."""
    for own, other in zip(found, wanted, strict=True):
        assert (own.tokens, own.finish) == (other.tokens, other.finish)
        assert own.versions == other.versions
        assert own.masks == other.masks
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("limits", [Limits(rows=24), TIGHT])
@pytest.mark.parametrize("name", ["qwen3", "qwen2-windows", "gpt2"])
def test_cuda_graph_replay_samples_the_same_tokens(
    start: Any, name: str, limits: Limits, overlap: bool
) -> None:
    """Covers moved caches and tables, preempted rows and late reads."""
    direct, replayed = (
        start(name, limits, overlap=overlap and graphs, graphs=graphs) for graphs in (False, True)
    )
    results = []
    for run in (direct, replayed):
        restricted = replace(OPTIONS, top_k=7, top_p=0.9, masks=True)
        sequences = run.add(12) + run.add(3, replace(OPTIONS, min_new_tokens=30), first=12)
        sequences += run.add(2, restricted, first=15)
        run.finish()
        results.append(sequences)
        assert run.batch.sampled == sum(len(sequence.logprobs) for sequence in sequences)
        pool = run.batch._pool
        assert len(pool._free) + len(pool._idle) == pool.made
        assert not any(pool._users)
    same(results[1], results[0])
    graphs = replayed.graphs
    assert graphs.replayed > graphs.captured > 0


@dataclass
class Replaced:
    """A graph that samples other tokens."""

    graph: Any

    @property
    def samples(self) -> Any:
        drawn: Sampled = self.graph.samples
        return drawn._replace(tokens=drawn.tokens + 1)

    def replay(self) -> None:
        self.graph.replay()


class WrongGraphs(RecordedGraphs):
    def __call__(self, compute: Any) -> Any:
        graph = super().__call__(compute)
        return Replaced(graph) if self.captured > 1 else graph


class RefusedGraphs(RecordedGraphs):
    def __call__(self, compute: Any) -> Any:
        if self.captured:
            compute()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return super().__call__(compute)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WrongGraphs, "samples other tokens"),
        (RefusedGraphs, "not permitted when stream is capturing"),
    ],
)
def test_cuda_graph_that_fails_or_samples_differently_is_not_used(
    start: Any, caplog: pytest.LogCaptureFixture, kind: Any, reason: str, overlap: bool
) -> None:
    """The log has a message, and all later calls run without graphs."""
    direct = start("qwen3", Limits(rows=24), overlap=False, graphs=False)
    run = start("qwen3", Limits(rows=24), overlap=overlap, graphs=True, kind=kind)
    results = []
    for each in (direct, run):
        results.append(each.add(12))
        each.finish()
    same(results[1], results[0])
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert run.graphs.captured <= 2


@pytest.mark.parametrize("copied", [False, True], ids=["weights-in-place", "weights-copied"])
@pytest.mark.parametrize(
    ("overlap", "stale_cache"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_cuda_graphs_follow_new_weights_aborts_and_later_requests(
    start: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, stale_cache: bool, copied: bool
) -> None:
    """The changes occur during decoding, even with a call whose tokens have not been read."""
    if not copied:  # as on a GPU
        monkeypatch.setattr(inference_module, "packable", lambda weight: False)
    results = []
    for graphs in (False, True):
        run = start("qwen3", Limits(rows=24), overlap=overlap and graphs, graphs=graphs)
        long = replace(OPTIONS, stop_token_ids=())
        sequences = run.add(6, long)
        for _ in range(12):
            run.batch.step()
        run.batch.abort(sequences[2:4])
        assert [len(sequence.logprobs) for sequence in sequences[2:4]] == [12, 12]
        with torch.no_grad():
            for parameter in run.decoder.parameters():
                parameter.mul_(1.1)
        run.batch.renew("2", stale_cache=stale_cache)
        for _ in range(5):
            run.batch.step()
        sequences += run.add(2, long, first=6)
        run.finish()
        results.append(sequences)
        assert {version for each in sequences for version in each.versions} == {"1", "2"}
    same(results[1], results[0])
    assert run.graphs.replayed > 20
