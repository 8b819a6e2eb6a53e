"""The fork server: its imports, its workers, and the remaining processes that it kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.fsio import atomic
from slurmrl.plan.build import make_plan
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import RankId
from slurmrl.workers import child_process
from slurmrl.workers.agent.children import Slot
from tests.support.trials import alive, wait_until

REPOSITORY = Path(__file__).parents[3]
WORKER = """
import os, subprocess, sys
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.worker import fork_server
def option(name):
    return int(sys.argv[sys.argv.index(name) + 1])
forked = fork_server.serve(Connection.from_fd(option("--pipe-fd")), option("--stacks-fd"))
if forked is None:
    sys.exit(0)
pipe = forked.pipe
os.write(option("--stacks-fd"), f"stacks of {forked.rank}".encode())
left = subprocess.Popen([sys.executable, "-c",
    "import os, time; from multiprocessing.shared_memory import SharedMemory;"
    "memory = SharedMemory(create=True, size=64);"
    "os.fork() and print(os.getpid(), memory.name, flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE, start_new_session=True, text=True)
number, memory = left.stdout.readline().split()
pipe.send({"type": "up", "pid": os.getpid(), "left": int(number), "memory": memory,
    "devices": os.environ["CUDA_VISIBLE_DEVICES"], "open": os.listdir("/proc/self/fd")})
message = pipe.receive(60)
os.kill(os.getpid(), message["signal"])
"""

OF_A_TASK = """
import gc, sys
from pathlib import Path
from slurmrl.tensors.parallel import device
from slurmrl.workers.worker import fork_server
fork_server.preload(Path(sys.argv[1]), "rollout")
assert gc.isenabled() and gc.get_freeze_count()
import torch
device.set_up(device.choose(0), threads=1, deterministic=True)
assert torch.are_deterministic_algorithms_enabled()
assert "slurmrl.rollouts.generation.native.native_rollout" in sys.modules
unused = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy"}
print(unused.intersection(sys.modules) or "none")
from torch._inductor import config  # for compiled models of the user
assert config.deterministic
"""
COMPUTE = """
import hashlib, os, sys
from pathlib import Path
import torch

def refuse(*arguments, **options):
    raise AssertionError("a fork server asked for GPUs")

names = ("is_available", "device_count", "init", "_lazy_init", "current_device")
real = {name: getattr(torch.cuda, name) for name in names}
for name in names:
    setattr(torch.cuda, name, refuse)
from slurmrl.tensors.parallel import device
from slurmrl.workers.worker import fork_server
fork_server.preload(Path(sys.argv[1]), "trainer")
assert not torch.cuda.is_initialized()
for name in names:
    setattr(torch.cuda, name, real[name])
assert len(os.listdir("/proc/self/task")) == 1, "a fork server has started a thread"
assert "slurmrl.workers.worker.executor" in sys.modules
assert "slurmrl.engines.fsdp.engine" in sys.modules
assert "slurmrl.algorithms.supervised" in sys.modules
assert "user_reward" not in sys.modules
assert "aiohttp" not in sys.modules, "only runs with servers need it"

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
    # the fork server has imported what takes long
    assert not [name for name in set(sys.modules) - known if name.startswith("torch._dynamo")]
    from torch._inductor import config  # for compiled models of the user
    assert config.deterministic
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(hashlib.sha256(data).hexdigest(), flush=True)

for _ in range(2):
    pid = os.fork()
    if pid == 0:
        compute()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
compute()  # in this process, which was not forked
"""


def output(code: str, *arguments: str, **variables: str) -> list[str]:
    """Return the words that a new interpreter prints."""
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


def test_forked_workers_compute_like_a_fresh_process(
    run: RunPaths,
) -> None:
    variables = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    first, second, fresh = output(COMPUTE, str(run.run), **variables)
    assert first == second == fresh


def test_rollout_task_does_not_import_unused_modules(make_settings: Any, paths: RunPaths) -> None:
    """Imports of the compiler and FSDP take as long as all others, and a task repeats them after
    each preemption.
    """
    settings = make_settings(
        algorithm={"name": "grpo", "batch_size": 4}, rollout={"tasks": {}, "n": 2}
    )
    paths.plan.write_bytes(make_plan(settings, scheduler="local").to_json().encode())
    assert output(OF_A_TASK, str(paths.run), CUDA_VISIBLE_DEVICES="") == ["none"]


class Host:
    """The agent's side of a fork server."""

    def __init__(self, module: str, options: list[str], folder: Path, pythonpath: str) -> None:
        environment = {**os.environ, "PYTHONPATH": pythonpath}
        with atomic.open_log(folder / "log") as output:
            self.process, self.line = child_process.spawn_with_pipe(
                "the fork server", module, options, output=output, environment=environment
            )
        self.slots = [Slot(RankId("trainer", rank), "n1") for rank in range(2)]

    def fork(self, rank: int = 0) -> None:
        self.slots[rank].fork(self.line, f"GPU-{rank}")

    def start(self, rank: int = 0) -> dict[str, Any]:
        """Fork a worker and return its first message."""
        self.fork(rank)
        return self.heard(self.slots[rank].pipe)

    def kill(self, rank: int = 0) -> None:
        self.line.send({"type": "kill", "rank": rank})

    def end(self, number: int) -> None:
        """Let the worker of rank 0 end itself by a signal."""
        pipe = self.slots[0].pipe
        assert pipe is not None
        pipe.send({"type": "end", "signal": number})

    def heard(self, pipe: Connection | None = None) -> dict[str, Any]:
        said = (pipe or self.line).receive(60)
        assert said is not None
        return said

    def forget(self, rank: int = 0) -> None:
        """Drop a worker that has ended."""
        slot = self.slots[rank]
        slot.running = False
        if slot.pipe is not None:
            slot.pipe.close()

    def close(self) -> None:
        self.line.close()
        self.process.close()
        for slot in self.slots:
            self.forget(slot.rank)
            os.close(slot.stacks_fd)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "stub.py").write_text(WORKER)
    found = Host("stub", [], tmp_path, f"{REPOSITORY}:{tmp_path}")
    yield found
    found.close()


def ended(rank: int, number: int) -> dict[str, Any]:
    return {"type": "ended", "rank": rank, "code": -number}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGRTMIN + 2])
def test_leftover_processes_of_a_worker_are_killed_with_the_worker(host: Host, number: int) -> None:
    """Also covers a process outside the process group.

    Shared memory is freed. Other ranks' workers are not killed.
    """
    said, other = host.start(0), host.start(1)
    assert alive(said["left"])
    memory = Path("/dev/shm", said["memory"])
    assert memory.exists()
    host.end(int(number))
    assert host.heard() == ended(0, number)
    assert not alive(said["left"])
    wait_until("the end of its shared memory", lambda: not memory.exists(), 60)
    assert alive(other["pid"])
    assert alive(other["left"])
    host.forget()
    assert host.start(0)["pid"] not in (said["pid"], other["pid"])


def test_child_of_a_running_worker_survives_the_end_of_another_worker(host: Host) -> None:
    """The parent of this child has ended, so a fork server could mistake it for a remaining process
    of the other worker.
    """
    other = host.start(1)
    children = Path(f"/proc/{other['left']}/task/{other['left']}/children").read_text().split()
    os.kill(other["left"], signal.SIGKILL)
    host.start(0)
    host.kill(0)
    assert host.heard() == ended(0, signal.SIGKILL)
    assert children
    assert all(alive(int(pid)) for pid in children)
    host.kill(1)
    assert host.heard() == ended(1, signal.SIGKILL)
    wait_until("orphans to end", lambda: not any(alive(int(pid)) for pid in children), 60)


def test_requests_wait_until_the_fork_server_is_ready(host: Host) -> None:
    host.fork()
    host.kill()
    assert host.heard() == ended(0, signal.SIGKILL)
    host.forget()
    assert host.start()["pid"] > 0


def test_pipe_is_held_by_one_worker_only(host: Host) -> None:
    """The test requests both workers before the fork server forks the first one."""
    host.fork(0)
    host.fork(1)
    first, second = (slot.pipe for slot in host.slots)
    host.heard(second)
    os.kill(host.heard(first)["pid"], signal.SIGKILL)
    assert first is not None
    assert first.receive(60) is None
    assert first.closed


def test_missing_package_is_named_in_the_failure(tmp_path: Path) -> None:
    """The fork server says what it cannot import and where to install it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import no_such_package.part\n")
    options = ["--run", str(tmp_path), "--world", "trainer", "--pulse-s", "1"]
    host = Host("slurmrl.workers.worker", options, tmp_path, f"{tmp_path}:{REPOSITORY}")
    assert host.heard() == {
        "type": "import_failed",
        "reason": "ModuleNotFoundError: No module named 'no_such_package'; install the package "
        f"that provides no_such_package for {sys.executable}",
    }
    assert host.process.process.wait(timeout=60) == 1
    host.close()
