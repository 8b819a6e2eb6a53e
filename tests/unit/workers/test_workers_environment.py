"""The environment that fork servers and their workers get from their agent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.plan.model import Plan
from slurmrl.workers.agent import fork_environment

REPOSITORY = Path(__file__).parents[3]
THREADS = """
import os
import numpy as np
print(len(os.listdir("/proc/self/task")))
"""


@pytest.fixture
def plan(plans: Callable[..., Plan]) -> Plan:
    plan = plans()
    groups = tuple(one.model_copy(update={"threads_per_worker": 4}) for one in plan.groups)
    return plan.model_copy(update={"groups": groups})


def with_engine(plan: Plan, engine: str, **sizes: int) -> Plan:
    actor = plan.models["actor"].model_copy(update={"engine": engine, "sizes": sizes})
    return plan.model_copy(update={"models": {**plan.models, "actor": actor}})


def test_fork_server_has_one_thread_with_any_worker_thread_count(plan: Plan) -> None:
    """Otherwise, numpy's OpenBLAS would start OMP_NUM_THREADS threads before the first fork."""
    given = fork_environment.of_fork_server(plan.groups[0], [""], os.environ, {})
    assert given["OMP_NUM_THREADS"] == "4"
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("engine", "sizes", "capability", "connections"),
    [
        ("megatron", {"dp": 2, "tp": 2}, 9.0, "1"),
        ("megatron", {"dp": 2, "tp": 2}, None, "1"),
        ("megatron", {"dp": 2, "tp": 2}, 10.0, None),
        ("megatron", {"dp": 4, "tp": 1}, 9.0, None),
        ("fsdp", {"dp": 2, "tp": 2}, 9.0, None),
    ],
)
def test_megatron_gets_one_gpu_connection_if_kernel_order_matters(
    plan: Plan,
    engine: str,
    sizes: dict[str, int],
    capability: float | None,
    connections: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other engines do not get it: FSDP's all-gathers would wait for computation."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    defaults = fork_environment.defaults(with_engine(plan, engine, **sizes), capability)
    given = fork_environment.of_fork_server(plan.groups[0], ["0"], os.environ, defaults)
    assert given.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections


def test_user_variables_override_defaults(plan: Plan) -> None:
    own = {"TORCH_FR_BUFFER_SIZE": "50", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}
    defaults = fork_environment.defaults(with_engine(plan, "megatron", tp=2), 9.0)
    given = fork_environment.of_fork_server(plan.groups[0], ["0"], own, defaults)
    assert given.items() >= own.items()


def test_nccl_flight_recorder_is_enabled(plan: Plan) -> None:
    given = fork_environment.of_fork_server(plan.groups[0], ["0"], {}, {})
    assert int(given["TORCH_FR_BUFFER_SIZE"]) >= 1000
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}  # torch would ignore it next to the new name
    assert "TORCH_FR_BUFFER_SIZE" not in fork_environment.of_fork_server(
        plan.groups[0], ["0"], own, {}
    )


@pytest.mark.parametrize(
    ("environ", "visible", "expected"),
    [
        ({}, "0", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, "", {}),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, "0", {"PYTORCH_ALLOC_CONF": "a:1"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, "GPU-a", {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        ({"PYTORCH_ALLOC_CONF": ""}, "0", {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_expandable_segments_are_default_unless_set_by_the_user(
    plan: Plan, environ: dict[str, str], visible: str, expected: dict[str, str]
) -> None:
    """Covers both of torch's names of the variable. A default must not override or contradict the
    user's value.
    """
    given = fork_environment.of_fork_server(plan.groups[0], [visible], environ, {})
    assert {name: value for name, value in given.items() if "ALLOC" in name} == expected
