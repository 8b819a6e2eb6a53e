"""The rank pool: results, remote errors, deadlines, and use after an error."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests import pool
from tests.pool import RankError, RankPool

HERE = "tests.distributed.test_pool"


def total(value: float) -> tuple[int, float]:
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("planted")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def name_a_missing_interface(rank: int) -> None:
    if dist.get_rank() == rank:
        os.environ["GLOO_SOCKET_IFNAME"] = "missing0"


def make_sharded(length: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.zeros_like(DTensor.from_local(torch.ones(length), mesh, [Shard(0)]))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def listen_to_a_rank_that_has_returned() -> str:
    if dist.get_rank() == 0:
        return ""
    try:
        dist.irecv(torch.zeros(1), 0).wait(timedelta(seconds=2))
    except RuntimeError as error:
        return str(error)
    return "received"


def test_pool_reuses_ranks_and_returns_results_in_rank_order(ranks: RankPool) -> None:
    first = ranks(2, f"{HERE}:total", 2.0)
    second = ranks(2, f"{HERE}:total", 5.0)
    assert [value for _, value in first] == [6.0, 6.0]
    assert [value for _, value in second] == [15.0, 15.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_pool_job_leaves_no_threads_of_its_process_groups(ranks: RankPool) -> None:
    """DTensor's caches hold meshes and their process groups, whose threads wake up regularly."""
    before = ranks(2, f"{HERE}:threads")
    for length in (2, 4, 6):
        ranks(2, f"{HERE}:make_sharded", length)
    assert ranks(2, f"{HERE}:threads") == before


def test_rank_that_has_returned_stays_connected_until_all_have_answered(ranks: RankPool) -> None:
    """A slower rank may still be building a group, which fails when a peer leaves."""
    _, reason = ranks(2, f"{HERE}:listen_to_a_rank_that_has_returned")
    assert "Timed out" in reason


def test_error_has_the_remote_traceback_and_the_pool_continues(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1: (.|\n)*fail_on(.|\n)*KeyError: 'planted'"):
        ranks(2, f"{HERE}:fail_on", 1)
    assert [value for _, value in ranks(2, f"{HERE}:total", 1.0)] == [3.0, 3.0]


def test_deadline_error_names_the_rank_and_its_code_position(ranks: RankPool) -> None:
    ranks(2, f"{HERE}:total", 1.0)
    with pytest.raises(TimeoutError, match=r"waited 10 s for rank \[1\](.|\n)*in hang_on"):
        ranks(2, f"{HERE}:hang_on", 1, deadline_s=10)
    assert [value for _, value in ranks(2, f"{HERE}:total", 1.0)] == [3.0, 3.0]


def test_exited_rank_is_reported_and_replaced(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0: exited with 7"):
        ranks(2, f"{HERE}:leave_on", 0)
    assert [value for _, value in ranks(2, f"{HERE}:total", 1.0)] == [3.0, 3.0]


def test_rank_that_cannot_join_is_replaced(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rank were reused, it and its peer would wait for each other under different group
    names.
    """
    monkeypatch.setattr(pool, "GRACE_S", 1.0)
    ranks(2, f"{HERE}:name_a_missing_interface", 0)
    with pytest.raises(RankError, match=r"rank 0: exited with 1(.|\n)*missing0"):
        ranks(2, f"{HERE}:total", 1.0)
    assert [value for _, value in ranks(2, f"{HERE}:total", 1.0)] == [3.0, 3.0]
