"""The process group: its timeout, its network interface, and waits without a timeout."""

from __future__ import annotations

import ast
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import slurmrl
from slurmrl.tensors.parallel import device
from slurmrl.workers import distributed
from slurmrl.workers.distributed import RunStore, collective_timeout, join, wait_for_all
from slurmrl.workers.messages import Start

COLLECTIVES = ("barrier", "monitored_barrier", "all_reduce", "broadcast", "all_gather", "reduce")
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize(("step_timeout_s", "minutes"), [(60.0, 30), (1800.0, 35), (7200.0, 125)])
def test_call_deadline_is_earlier_than_collective_timeout(
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
def test_network_interface_is_exact_unless_set_by_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_user: dict[str, str],
    in_force: tuple[str, str],
) -> None:
    """NCCL treats a bare name as a prefix: ib0 would also select ib01."""
    formed = SimpleNamespace(
        init_process_group=lambda *_, **__: None, group=SimpleNamespace(WORLD=device.CPU)
    )
    monkeypatch.setattr(distributed, "dist", formed)
    for name in NAMES:
        monkeypatch.setenv(name, of_user.get(name, ""))
        if name not in of_user:
            monkeypatch.delenv(name)
    start = Start(world_size=1, interface="ib0")
    join(start, 0, tmp_path / "meeting", device.CPU, timedelta(seconds=9))
    assert tuple(os.environ[name] for name in NAMES) == in_force


def test_ranks_wait_for_each_other_through_the_store(tmp_path: Path) -> None:
    def waiting(rank: int, name: str, timeout_s: float) -> Future[None]:
        store = RunStore(tmp_path, 3, timedelta(seconds=timeout_s))
        return pool.submit(wait_for_all, store, rank, 3, name)

    with ThreadPoolExecutor(3) as pool:
        early = [waiting(rank, "early", 0.2) for rank in range(2)]
        assert all(isinstance(one.exception(60), RuntimeError) for one in early), "one is missing"
        all_there = [waiting(rank, "x", 60) for rank in range(3)]
        assert [one.result(60) for one in all_there] == [None] * 3


def test_store_opens_no_port() -> None:
    users = [
        path.name
        for path in Path(slurmrl.__file__).parent.rglob("*.py")
        if re.search(r"\bTCPStore\(|\binit_method=(?!config\.)|env://", path.read_text())
    ]
    assert users == []


def test_every_collective_names_its_group() -> None:
    """A collective without a group makes a communicator of the whole world. This uses memory on
    each GPU, and a resumed incarnation would differ from another one.
    """
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
