"""Requests that the ranks of a split model serve together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmrl.engines.base import ServingOptions
from slurmrl.errors import RunFailedError, UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.paged import PagedDecoder
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import GenerationOptions, WeightVersion
from slurmrl.rollouts.generation.native import batch as batch_module
from slurmrl.rollouts.generation.native import decode as decode_module
from slurmrl.rollouts.generation.native import model_runner as runner_module
from slurmrl.rollouts.generation.native import native_rollout as rollout_module
from slurmrl.rollouts.generation.native.batch_schedule import Limits
from slurmrl.rollouts.generation.native.native_rollout import NativeRollout
from slurmrl.rollouts.generation.native.split_batch import SplitRanks
from slurmrl.tensors.ops.products import packable
from tests.distributed.engines.cases import (
    ARCHITECTURE,
    LENGTHS,
    Setup,
    batch,
    make,
    model,
    prompts,
)
from tests.pool import RankError, RankPool
from tests.support.decoder_folders import to_hf
from tests.support.generated import generated, letters, request
from tests.unit.models.conftest import random_decoder

HERE = "tests.distributed.engines.test_engines_native_ranks"
TIGHT = Limits(rows=6, step_tokens=12, cache_tokens=96, page_tokens=4)
"""A cache for about two of the longest sequences, so that rows are preempted."""
LAYOUTS = {
    "t2": Setup(model=model(), sizes={"dp": 1, "tp": 2}),
    "t2 with sequence parallelism": Setup(
        model=model(model={"sequence_parallel": True}), sizes={"dp": 1, "tp": 2}
    ),
    "c2": Setup(model=model(), sizes={"dp": 1, "cp": 2}),
}
Work = Callable[[NativeRollout], Awaitable[Any]]


@dataclass
class Counted:
    """Counts of the model calls and broadcasts of one rank."""

    steps: int = 0
    preempted: int = 0
    broadcasts: int = 0
    drawn: int = 0
    checksum: int = 0
    free: bool = False
    result: Any = None


@contextmanager
def served(
    setup: Setup, *, overlap: bool, timeout_s: float | None = None, stale_cache: bool = False
) -> Any:
    """Return a rank's engine and its counts. With a timeout, the ranks use a separate process group
    for messages.
    """
    engine: Any = make(setup)
    group = engine.context.groups.get("data")
    peers = None if group is None else SplitRanks(group, engine.context.device)
    if timeout_s is not None:
        peers = SplitRanks(
            dist.new_group(timeout=timedelta(seconds=timeout_s)), torch.device("cpu")
        )
    with torch.no_grad(), engine._shards.gathered() as decoder:
        rollout = NativeRollout(
            decoder,
            limits=TIGHT,
            version="0.1",
            own=False,
            peers=peers,
            decode=letters,
            stale_cache=stale_cache,
        )
        batch, counted = rollout._own, Counted()
        batch._overlap = overlap
        step, preempt = batch._schedule.next, batch._schedule.preempt

        def next_step(settle: Any) -> Any:
            counted.steps += 1
            return step(settle)

        def preempted(sequence: Any) -> None:
            counted.preempted += 1
            preempt(sequence)

        batch._schedule.next, batch._schedule.preempt = next_step, preempted  # type: ignore[method-assign]
        yield rollout, counted
        pool = batch._pool
        counted.free = len(pool._free) + len(pool._idle) == pool.made and not any(pool._users)
        counted.drawn, counted.checksum = batch.sampled, batch.checksum
        counted.broadcasts = peers.broadcasts if peers else 0


def work(setup: Setup, name: str, *args: Any, overlap: bool = False, **more: Any) -> Counted:
    """Run one of the functions below on the leader, while the others follow."""
    with served(setup, overlap=overlap, **more) as (rollout, counted):
        if rollout._peers is None or rollout._peers.is_leader:
            counted.result = asyncio.run(globals()[name](rollout, *args))
            rollout.dismiss()
        else:
            rollout.follow()
    return counted


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def everything(
    rollout: NativeRollout, weights: Path, other: Path
) -> dict[str, tuple[Completion, ...]]:
    """Serve requests with all options, which start and end at different times, while weights
    change.
    """
    futures = {
        name: rollout.submit(one)
        for name, one in {
            "group": request("group", 11, 1, 2, 3),
            "equal": request("equal", 11, 4),
            "greedy": request("greedy", 6, 5, greedy=True, first=9),
            "stops": request("stops", 5, 6, 7, stop_token_ids=(11, 12, 13), min_new_tokens=3),
            "strings": request("strings", 5, 8, stop_strings=("aab", "ccc", "ff")),
            "top": request("top", 30, 9, top_k=5, top_p=0.9, first=3, masks=True),
            "aborted": request("aborted", 8, 10, 11, max_new_tokens=60),
            "cancelled": request("cancelled", 8, 12, max_new_tokens=60),
        }.items()
    }
    await turns(9)
    futures.pop("cancelled").cancel()
    with suppress(UsageError):
        await rollout.submit(request("refused", 90, 13))
    await turns(9)
    rollout.abort("aborted")
    with pytest.raises(UsageError, match="layers"):
        await rollout.update_weights(WeightVersion(name="wrong", folder=other))
    await rollout.update_weights(WeightVersion(name="1.1", folder=weights))
    futures["again"] = rollout.submit(request("aborted", 9, 14, 15))
    await rollout.pause()
    await turns(3)
    await rollout.resume()
    await asyncio.gather(*futures.values())
    # A request of many tokens, which the message in front has no room for.
    long = [request(f"long {n}", 60, 30 + n, max_new_tokens=4, first=n) for n in range(12)]
    futures |= {one.request_id: rollout.submit(one) for one in long}
    return {name: await future for name, future in futures.items()}


def alike(found: Completion, wanted: Completion) -> None:
    assert (found.tokens, found.versions, found.finish) == (
        wanted.tokens,
        wanted.versions,
        wanted.finish,
    )
    assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    assert found.masks == wanted.masks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return folders with new weights, and with weights of another architecture."""
    made = []
    for layers in (3, 1):
        folder = tmp_path_factory.mktemp("weights")
        config = ModelConfig.from_hf({**ARCHITECTURE, "num_hidden_layers": layers})
        to_hf(random_decoder(config, 1, 1.0), folder)
        made.append(folder)
    return made[0], made[1]


@pytest.mark.parametrize(
    ("layout", "overlap", "stale_cache"),
    [
        ("t2", False, False),
        ("t2", True, True),
        ("t2 with sequence parallelism", False, False),
        ("c2", True, False),
    ],
)
def test_tensor_parallel_models_serve_like_one_rank(
    ranks: RankPool, layout: str, overlap: bool, stale_cache: bool, folders: tuple[Path, Path]
) -> None:
    """Covers groups, stops, aborts, rejections, preemption, pauses, and new weights during
    completions. All ranks make the same steps, each with one broadcast.
    """
    setup = LAYOUTS[layout]
    whole = Setup(model=model(), split=[range(5)])
    more = {"overlap": overlap, "stale_cache": stale_cache}
    (alone,) = ranks(1, f"{HERE}:work", whole, "everything", *folders, **more)
    leader, other = ranks(2, f"{HERE}:work", setup, "everything", *folders, **more)
    assert leader.result.keys() == alone.result.keys()
    for name, completions in alone.result.items():
        for found, wanted in zip(leader.result[name], completions, strict=True):
            alike(found, wanted)
    assert {c.finish for c in leader.result["aborted"]} == {"aborted"}
    assert {v for cs in leader.result.values() for c in cs for v in c.versions} == {"0.1", "1.1"}
    assert leader.preempted == other.preempted == alone.preempted > (3 if stale_cache else 5)
    assert leader.steps == other.steps == alone.steps
    assert (leader.drawn, leader.checksum) == (other.drawn, other.checksum)
    assert leader.free
    assert other.free
    # Two attempts to read weights, the end, and the rest of two long messages.
    assert leader.broadcasts == other.broadcasts == leader.steps + 5


async def in_company(rollout: NativeRollout) -> dict[str, set[tuple[float, ...]]]:
    """Return log-probabilities of the same completions, sampled again in batches of different
    sizes.
    """
    found: dict[str, set[tuple[float, ...]]] = {}
    for company in range(6):
        requests = [request(f"one {n}", 5 + n, n) for n in range(company, 6)]
        for one, (completion,) in zip(
            requests, await asyncio.gather(*map(rollout.submit, requests)), strict=True
        ):
            found.setdefault(one.request_id, set()).add(completion.logprobs)
    return found


@pytest.mark.skipif(not packable(torch.zeros(8, 8)), reason="no compiled products here")
@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_logprobs_of_split_models_do_not_depend_on_the_batch(ranks: RankPool, layout: str) -> None:
    """Requests of episodes arrive at random times, so otherwise no trial would be reproducible."""
    leader, _ = ranks(2, f"{HERE}:work", LAYOUTS[layout], "in_company")
    assert {name: len(bits) for name, bits in leader.result.items()} == {
        f"one {n}": 1 for n in range(6)
    }


def memory_of_all(setup: Setup) -> int:
    """Return the memory limit of the cache if rank r has 100 - r free bytes."""
    engine: Any = make(setup)
    split = engine._shards.decoder.split
    return batch_module._least(100 - dist.get_rank(), split, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_cache_size_of_all_ranks_follows_the_least_free_memory(
    ranks: RankPool, layout: str
) -> None:
    """With different cache sizes, ranks would preempt different rows."""
    assert ranks(2, f"{HERE}:memory_of_all", LAYOUTS[layout]) == [99, 99]


async def idle(rollout: NativeRollout, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await rollout.submit(request("first", 4, 1))
    await asyncio.sleep(seconds)
    await rollout.submit(request("second", 4, 1))


def test_idle_leader_does_not_cause_a_collective_timeout(
    ranks: RankPool,
) -> None:
    """The other ranks wait for the leader before its first request and between requests."""
    leader, other = ranks(2, f"{HERE}:work", LAYOUTS["t2"], "idle", 6.0, timeout_s=5.0)
    assert leader.drawn == other.drawn == 40


async def one_request(rollout: NativeRollout) -> None:
    await rollout.submit(request("only", 4, 1))


def breaking(setup: Setup, how: str, weights: Path) -> None:
    """Serve ``one_request``, during which one rank fails."""
    with served(setup, overlap=False) as (rollout, _):
        batch, sample = rollout._batch, runner_module.sample
        leads = rollout._peers.is_leader

        def step() -> Any:
            if batch.sampled == 5:
                os._exit(7)
            return taken()

        def other_tokens(*args: Any, **options: Any) -> Any:
            drawn = sample(*args, **options)
            return drawn._replace(tokens=(drawn.tokens + 1) % 33)

        def unreadable(*_: object) -> None:
            raise OSError("stale file handle")

        taken = batch.step
        if how == f"rank {int(not leads)} exits":
            batch.step = step
        if how == "other tokens" and not leads:
            runner_module.sample = other_tokens
        if how == "weights" and not leads:
            rollout_module.read_weights = unreadable  # type: ignore[assignment]
        try:
            if not leads:
                rollout.follow()
            elif how == "weights":
                version = WeightVersion(name="1.1", folder=weights)
                asyncio.run(rollout.update_weights(version))
            else:
                asyncio.run(one_request(rollout))
        finally:
            runner_module.sample = sample
            rollout_module.read_weights = READ_WEIGHTS
            rollout.dismiss()


READ_WEIGHTS = rollout_module.read_weights


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("rank 1 exits", ["rank 1: exited with 7", "the model failed"]),
        ("rank 0 exits", ["rank 0: exited with 7", "in receive"]),
        ("other tokens", ["rank 1 of a split model has sampled other tokens"]),
        ("weights", ["could not be read .* other ranks of the model", "stale file handle"]),
    ],
)
def test_failed_rank_ends_the_other_ranks(
    ranks: RankPool, how: str, messages: list[str], folders: tuple[Path, Path]
) -> None:
    """No rank waits for a timeout or continues with other tokens or weights than the others."""
    with pytest.raises(RankError) as caught:
        ranks(2, f"{HERE}:breaking", LAYOUTS["t2"], how, folders[0], deadline_s=120)
    for message in messages:
        caught.match(f"(?s){message}")


def leaving(setup: Setup) -> str:
    """Let the leader raise an error while it serves, and then compute with the other ranks."""
    engine: Any = make(setup)
    caught = ""
    try:
        with engine.serving("0.1", ServingOptions(rows=4)) as rollout:
            if rollout is not None:
                raise RunFailedError("an episode's own error")
    except RunFailedError as error:
        caught = str(error)
    dist.barrier()
    return caught


def test_leader_that_raises_releases_the_other_ranks(ranks: RankPool) -> None:
    assert ranks(2, f"{HERE}:leaving", LAYOUTS["t2"]) == ["an episode's own error", ""]


def whole_batch(setup: Setup) -> tuple[list[Any], list[Any]]:
    """Generate a batch twice. Return each time the number of tokens in each model call, the
    completions and their log-probabilities.
    """
    engine: Any = make(setup)
    sample = prompts(batch())
    options = GenerationOptions(max_new_tokens=8, stop_token_ids=(3, 4))
    read, results = PagedDecoder.logits, []

    def counted(self: PagedDecoder, *args: Any) -> Any:
        calls.append(int((args[2].slots != self.cache.spare).sum()))
        return read(self, *args)

    PagedDecoder.logits = counted  # type: ignore[method-assign]
    try:
        for _ in range(2):
            calls: list[int] = []
            out = generated(engine, sample, options, seed=3, step=0, keys=torch.arange(30))
            results.append([calls, out.tokens.tolist(), out.logprobs.tolist()])
    finally:
        PagedDecoder.logits = read  # type: ignore[method-assign]
    return results[0], results[1]


def disagreeing(setup: Setup, token: int) -> None:
    """Generate a batch in which the second rank samples another token at one position."""
    engine: Any = make(setup)
    sample, draws = decode_module.sample, count()

    def other_token(*args: Any, **options: Any) -> Any:
        drawn = sample(*args, **options)
        if dist.get_rank() == 1 and next(draws) == 2:
            drawn.tokens[0] = token
        return drawn

    decode_module.sample = other_token  # type: ignore[assignment]
    options = GenerationOptions(max_new_tokens=8, stop_token_ids=(3, 4))
    try:
        generated(engine, prompts(batch()), options, seed=3, step=0, keys=torch.arange(30))
    finally:
        decode_module.sample = sample


@pytest.mark.parametrize("token", [3, 32], ids=["stop", "other"])
@pytest.mark.parametrize("layout", ["t2", "c2"])
def test_ranks_end_if_they_sample_different_tokens(
    ranks: RankPool, layout: str, token: int
) -> None:
    """All ranks end before one of them continues with fewer rows, which would hang the others."""
    with pytest.raises(RankError) as caught:
        ranks(2, f"{HERE}:disagreeing", LAYOUTS[layout], token)
    message = "RunFailedError: rank 1 of a split model has sampled other tokens"
    assert str(caught.value).count(message) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_batches_of_tensor_parallel_models_become_requests(
    ranks: RankPool, layout: str
) -> None:
    """Three completions of a prompt share one prefill, as on one rank. All ranks get the same bits
    in both runs.
    """
    whole = Setup(model=model(), split=[range(10)])
    ((alone, _),) = ranks(1, f"{HERE}:whole_batch", whole)
    (first, second), other = ranks(2, f"{HERE}:whole_batch", LAYOUTS[layout])
    assert first == second
    assert (first, second) == other
    assert first[:2] == alone[:2]
    assert first[0][0] == sum(LENGTHS)
    assert first[2] == pytest.approx(alone[2], abs=1e-5)
