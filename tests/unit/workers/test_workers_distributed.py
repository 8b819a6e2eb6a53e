"""The process group: its time-out, its network interface, and what waits without it."""

from __future__ import annotations

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import slurmrl
from slurmrl.parallel import device
from slurmrl.workers import distributed
from slurmrl.workers.distributed import collective_timeout, join, wait_for_all
from slurmrl.workers.messages import Start

COLLECTIVES = ("barrier", "monitored_barrier", "all_reduce", "broadcast", "all_gather", "reduce")
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(("step_timeout_s", "minutes"), [(60.0, 30), (1800.0, 35), (7200.0, 125)])
def test_the_deadline_of_a_call_comes_before_that_of_a_collective(
    step_timeout_s: float, minutes: int
) -> None:
    assert collective_timeout(step_timeout_s) == timedelta(minutes=minutes)


@pytest.mark.parametrize(
    ("of_user", "in_force"),
    [
        ({}, ("ib0", "=ib0")),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, ("ib0", "^docker,lo")),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, ("eth1", "=ib0")),
    ],
)
def test_the_interface_is_exact_and_a_users_own_choice_stays(
    monkeypatch: pytest.MonkeyPatch, of_user: dict[str, str], in_force: tuple[str, str]
) -> None:
    """NCCL takes a bare name for a prefix: ib0 would also choose ib01."""
    monkeypatch.setattr(distributed, "TCPStore", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for name in NAMES:
        monkeypatch.setenv(name, of_user.get(name, ""))
        if name not in of_user:
            monkeypatch.delenv(name)
    start = Start(store="h:1", world_size=1, interface="ib0")
    join(start, 0, None, device.CPU, timedelta(seconds=9))
    assert tuple(os.environ[name] for name in NAMES) == in_force


def test_ranks_wait_for_all_through_the_store() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        short = timedelta(milliseconds=200)
        early = [pool.submit(wait_for_all, store, "early", 3, short) for _ in range(2)]
        assert all(isinstance(one.exception(60), RuntimeError) for one in early), "one is missing"
        all_there = [
            pool.submit(wait_for_all, store, "x", 3, timedelta(seconds=60)) for _ in range(3)
        ]
        assert [one.result(60) for one in all_there] == [None] * 3


def test_no_collective_takes_all_ranks_for_granted() -> None:
    """One without a group makes a communicator of the whole world: memory on each GPU, and an
    incarnation that resumes would differ from one that does not."""
    found = []
    for path in Path(slurmrl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_dist = isinstance(node.func.value, ast.Name) and node.func.value.id == "dist"
            of_all = not any(keyword.arg == "group" for keyword in node.keywords)
            if of_dist and of_all and node.func.attr.startswith(COLLECTIVES):
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
