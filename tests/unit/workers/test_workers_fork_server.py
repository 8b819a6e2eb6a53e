"""The fork server: its imports, the workers that it forks, and the leftovers that it kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.channel.pipe import Connection
from slurmrl.fsio import atomic
from slurmrl.paths import RunPaths
from slurmrl.plan.build import make_plan
from slurmrl.workers import process
from slurmrl.workers.agent.slot import Slot
from slurmrl.worlds import RankId
from tests.support.trials import wait_until

REPOSITORY = Path(__file__).parents[3]
UNTOUCHED = """
import os, sys
from pathlib import Path
import torch

def refuse(*arguments, **options):
    raise AssertionError("a fork server asked for GPUs")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
from slurmrl.workers.worker import fork_server
fork_server.preload(Path(sys.argv[1]), "trainer")
assert not torch.cuda.is_initialized()
assert "slurmrl.workers.worker.executor" in sys.modules
assert "slurmrl.engines.fsdp.engine" in sys.modules
assert "slurmrl.algorithms.sft.interface" in sys.modules
assert "user_reward" not in sys.modules
assert "aiohttp" not in sys.modules, "only runs with servers need it"
print(len(os.listdir("/proc/self/task")))
"""
WORKER = """
import os, subprocess, sys
from slurmrl.channel.pipe import Connection
from slurmrl.workers.worker import fork_server
pipe = fork_server.serve(Connection.from_fd(int(sys.argv[sys.argv.index("--pipe-fd") + 1])), 0)
if pipe is None:
    sys.exit(0)
left = subprocess.Popen([sys.executable, "-c",
    "import os, time; from multiprocessing.shared_memory import SharedMemory;"
    "memory = SharedMemory(create=True, size=64);"
    "print(os.getpid(), memory.name, flush=True); os.fork(); time.sleep(600)"],
    stdout=subprocess.PIPE, start_new_session=True, text=True)
number, memory = left.stdout.readline().split()
pipe.send({"type": "up", "pid": os.getpid(), "left": int(number), "memory": memory})
message = pipe.receive(60)
os.kill(os.getpid(), message["signal"])
"""

OF_A_TASK = """
import gc, sys
from pathlib import Path
from slurmrl.parallel import device
from slurmrl.workers.worker import fork_server
fork_server.preload(Path(sys.argv[1]), "rollout")
assert gc.isenabled() and gc.get_freeze_count()
import torch
device.set_up(device.choose(0), threads=1, deterministic=True)
assert torch.are_deterministic_algorithms_enabled()
assert "slurmrl.engines.rollout.native.rollout" in sys.modules
unused = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy"}
print(unused.intersection(sys.modules) or "none")
from torch._inductor import config  # for compiled models of the user
assert config.deterministic
"""
COMPUTE = """
import hashlib, os, sys
from pathlib import Path
import torch
from slurmrl.parallel import device
from slurmrl.workers.worker import fork_server

def compute():
    known = set(sys.modules)
    device.set_up(device.choose(0), threads=2, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it would plan anew for each decode length
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.GELU(), torch.nn.Linear(500, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = model(torch.randn(400, 300)).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if int(sys.argv[2]):  # the fork server has imported what takes long
        assert not [name for name in set(sys.modules) - known if name.startswith("torch._dynamo")]
    from torch._inductor import config  # for compiled models of the user
    assert config.deterministic
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(data).hexdigest(), flush=True)

fork_server.preload(Path(sys.argv[1]), "trainer")
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        compute()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
if sys.argv[2] == "0":
    compute()
"""


def output(code: str, *arguments: str, **variables: str) -> list[str]:
    """The words that a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_forked_workers_compute_what_a_fresh_one_does(run: RunPaths) -> None:
    def results(forks: int) -> list[str]:
        variables = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
        return output(COMPUTE, str(run.run), str(forks), **variables)

    fresh = results(0)
    assert len(fresh) == 1
    assert results(2) == fresh * 2


def test_preloading_touches_no_gpu_and_starts_no_thread(run: RunPaths) -> None:
    assert output(UNTOUCHED, str(run.run)) == ["1"]


def test_a_rollout_task_starts_without_what_it_does_not_use(
    make_settings: Any, paths: RunPaths
) -> None:
    """Compiler and FSDP take as long as all else, and it loses that each time it is preempted."""
    settings = make_settings(
        algorithm={"name": "grpo", "batch_size": 4}, rollout={"tasks": {}, "n": 2}
    )
    paths.plan.write_bytes(make_plan(settings, scheduler="local").to_json().encode())
    assert output(OF_A_TASK, str(paths.run), CUDA_VISIBLE_DEVICES="") == ["none"]


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    (tmp_path / "stub.py").write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    found = Slot(
        RankId("trainer", 0),
        "n1",
        lambda name, output: process.spawn_with_pipe(
            name, "stub", [], output=output, environment=environment
        ),
    )
    with atomic.open_log(tmp_path / "log") as output:
        found.start_fork_server(output)
    yield found
    if (fork_server := found.drop_fork_server()) is not None:
        fork_server.close()


def start(slot: Slot) -> dict[str, Any]:
    slot.fork()
    assert slot.pipe is not None
    said = slot.pipe.receive(60)
    assert said is not None
    return said


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 2])
def test_what_a_worker_leaves_behind_goes_with_it(slot: Slot, number: int) -> None:
    """Also what left its process group; it could hold the GPU against the next worker. Its shared
    memory does not stay in the memory of the host."""
    said = start(slot)
    assert alive(said["left"])
    memory = Path("/dev/shm", said["memory"])
    assert memory.exists()
    assert slot.pipe is not None
    slot.pipe.send({"type": "end", "signal": int(number)})
    assert slot.line is not None
    assert slot.line.receive(60) == {"type": "ended", "code": -int(number)}
    assert not alive(said["left"])
    wait_until("the end of its shared memory", lambda: not memory.exists(), 60)


def test_everything_goes_with_the_agent_s_end_of_the_line(slot: Slot) -> None:
    """In a container the fork server may not be the process that the agent can kill."""
    said = start(slot)
    assert slot.line is not None
    slot.line.close()
    assert slot.fork_server is not None
    assert slot.fork_server.process.wait(timeout=60) == 0
    wait_until("the worker to die", lambda: not alive(said["pid"]), 60)


def test_orders_before_the_fork_server_is_ready_wait(slot: Slot) -> None:
    slot.fork()
    slot.kill()
    assert slot.line is not None
    assert slot.line.receive(60) == {"type": "ended", "code": -signal.SIGKILL}
    assert slot.pipe is not None
    slot.drop_worker()
    slot.running = False
    assert start(slot)["pid"] > 0


def test_an_order_without_a_worker(slot: Slot) -> None:
    """The worker ended by itself while the message was in transit."""
    assert slot.line is not None
    slot.line.send({"type": "kill"})
    assert start(slot)["pid"] > 0


def test_a_pipe_is_held_by_one_worker_only(slot: Slot) -> None:
    said = start(slot)
    os.kill(said["pid"], signal.SIGKILL)
    assert slot.pipe is not None
    assert slot.pipe.receive(60) is None
    assert slot.pipe.closed
    other, mine = Connection.pair()
    other.close()
    mine.close()


def test_a_package_that_is_missing_is_named_in_the_failure(tmp_path: Path) -> None:
    """The end of the fork server says what cannot be imported and where to install it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import no_such_package.part\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    options = ["--run", str(tmp_path), "--world", "trainer", "--rank", "0", "--pulse-s", "1"]
    slot = Slot(
        RankId("trainer", 0),
        "n1",
        lambda name, output: process.spawn_with_pipe(
            name, "slurmrl.workers.worker", options, output=output, environment=environment
        ),
    )
    with atomic.open_log(tmp_path / "log") as output:
        slot.start_fork_server(output)
    slot.fork()
    (ended,) = slot.fork_server_ended()
    fork_server = slot.drop_fork_server()
    assert fork_server is not None
    fork_server.close()
    assert str(ended) == (
        "the fork server of rank 0 on n1 exited with code 1: ModuleNotFoundError: No module named "
        f"'no_such_package'; install the package that provides no_such_package for {sys.executable}"
    )
