"""The clock of measured collectives: CPU seconds inside a host, wall seconds between hosts."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slurmrl.tensors.parallel.device import CPU
from slurmrl.workers import hardware_measures
from slurmrl.workers.hardware_measures import Measures, Ranks
from slurmrl.workers.hardware_sizes import ON_CPUS

WAIT_S = 0.02


def wait(*_: Any, **__: Any) -> SimpleNamespace:
    time.sleep(WAIT_S)
    return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize(("place", "waits_count"), [("host", False), ("hosts", True)])
def test_measured_time_includes_waits_only_between_hosts(
    place: str, waits_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between hosts, the network transfers data while the processor of a rank waits."""
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv")
    slow = SimpleNamespace(
        **dict.fromkeys(names, wait), barrier=wait, ReduceOp=hardware_measures.dist.ReduceOp
    )
    monkeypatch.setattr(hardware_measures, "dist", slow)
    sizes = replace(ON_CPUS, point_s=WAIT_S, sides=[16], message_bytes=[1024])
    measures, ranks = Measures(sizes, CPU, threads=1), Ranks(0, 2, None, place, 1)
    points = [*measures.collectives(ranks), *measures.overlap(ranks)]
    assert {one["what"] for one in points} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "send",
        "overlap",
    }
    for point in points:
        assert (point["seconds"] >= WAIT_S) == waits_count, point
