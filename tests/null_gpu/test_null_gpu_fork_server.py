"""Tests that the imports of a fork server start no thread and do not call CUDA, with the CUDA build
of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmrl.desk.proposal import prepare, propose
from tests.fake_runs import write_config

REPOSITORY = Path(__file__).parents[2]
PRELOAD = """
import json, os, sys
from pathlib import Path
from slurmrl.engines import ENGINES
from slurmrl.workers.worker import fork_server
from tests.null_gpu import device

fork_server.preload(Path(sys.argv[1]), "trainer")
ENGINES.load(sys.argv[2])
threads = len(os.listdir("/proc/self/task"))
called = {name: count for name, count in device.counts().items() if count}
import torch
initialized = torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    torch.ones(3, device="cuda").sum().item()  # refused after a fork from an initialized parent
    os._exit(0)
print(json.dumps([threads, called, initialized, os.waitpid(child, 0)[1]]))
"""


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_imports_of_a_fork_server_start_no_thread_and_do_not_call_cuda(
    engine: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "runs")
    proposal = propose(write_config(tmp_path), [], root=root, scheduler="local")
    prepare(proposal.paths, proposal.settings, proposal.plan, proposal.recorder)
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD, str(proposal.paths.run), engine],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, {}, False, 0]
