"""An agent's children: their ends, and their messages, including messages larger than a pipe's
buffer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema.cluster import Cluster
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.plan.model import Plan
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.workers import child_process
from slurmrl.workers.agent import children as children_module
from slurmrl.workers.agent.children import Children, Ended, News
from slurmrl.workers.messages import Done, RunCall, Save
from tests.support.trials import alive, wait_until
from tests.unit.workers.conftest import make_plan

REPOSITORY = Path(__file__).parents[3]
STUB = """
import os, sys
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.worker import fork_server
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
line = Connection.from_fd(int(option("--pipe-fd")))
forked = fork_server.serve(line, int(option("--stacks-fd")))
if forked is None:
    sys.exit(0)
rank, pipe = forked
def say(**text):
    pipe.send({"type": "done", "rank": rank, "seq": 0, "seconds": 0, "texts": [text]})
say(pid=os.getpid(), fork_server=os.getppid(), pulse=option("--pulse-s"),
    devices=os.environ["CUDA_VISIBLE_DEVICES"], threads=os.environ["OMP_NUM_THREADS"],
    comm=open("/proc/self/comm").read())
while (message := pipe.receive(60)) is not None:
    if message["type"] == "save":
        sys.exit(message["step"])
    if message["name"] == "pulse":
        pipe.send({"type": "pulse"})
    else:
        say(size=len(message["name"]), echo=message["name"])
"""
MASTER = """
import sys, time
from slurmrl.run.channel.pipe import Connection
pipe = Connection.from_fd(int(sys.argv[sys.argv.index("--pipe-fd") + 1]))
assert sys.argv[sys.argv.index("--job") + 1] == "41.0.0"
pipe.send({"type": "pulse"})
time.sleep(600)
"""


def echo(text: str) -> RunCall:
    return RunCall(step=0, name=text, scalars={})


def leave(code: int) -> Save:
    return Save(step=code, directory="d")


class Ear:
    """Receives messages until a condition holds."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self.said: list[tuple[int, Mapping[str, Any]]] = []
        """What ranks said, with the rank."""
        self.ended: list[Ended] = []

    def until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not enough():
            assert time.monotonic() < deadline, (self.said, self.ended)
            news: News = self.children.turn(0.05)
            for message in news.received:
                assert isinstance(message, Done)
                self.said.append((message.rank, message.texts[0]))
            self.ended += news.ended

    def of(self, rank: int) -> Mapping[str, Any]:
        return next(text for which, text in reversed(self.said) if which == rank)

    def fork(self, folder: Path) -> None:
        """Start the next incarnation's workers and wait for their first messages."""
        self.said.clear()
        self.ended.clear()
        with atomic.open_log(folder / "workers.log") as output:
            self.children.start_workers(["GPU-a", ""], output)
        self.until(lambda: len(self.said) == 2)


def make_children(folder: Path) -> Children:
    """Make the children of host 1 of 2: two stub workers with ranks 2 and 3."""
    paths = RunPaths.of(folder, "someone", "exp", "1")
    for directory in paths.directories():
        atomic.make_private_directory(directory)
    identity = Identity("trainer", 1, 0, "n1", "41.0.0", "41_0", os.getpid())
    cluster = Cluster(heartbeat_s=2.0, silence_s=4.0)
    return Children(paths, make_plan(hosts=2).groups[0], identity, cluster)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Yield the child processes of all tests, because a fork server takes seconds to start."""
    folder = tmp_path_factory.mktemp("children")
    (folder / "stub_worker.py").write_text(STUB)
    (folder / "stub_master.py").write_text(MASTER)
    spawn = child_process.spawn_with_pipe

    def spawn_stub(
        name: str, module: str, arguments: list[str], **more: Any
    ) -> tuple[child_process.Child, Connection]:
        stub = {
            "slurmrl.workers.worker": "stub_worker",
            "slurmrl.workers.master": "stub_master",
        }[module]
        return spawn(name, stub, arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{folder}")
        patch.setattr(child_process, "spawn_with_pipe", spawn_stub)
        found = make_children(folder)
        yield found
        found.close()


@pytest.fixture
def ear(children: Children, tmp_path: Path) -> Iterator[Ear]:
    """Return the children with new workers for each test."""
    found = Ear(children)
    found.fork(tmp_path)
    yield found
    found.children.end()


def test_workers_know_rank_devices_and_threads(ear: Ear) -> None:
    for rank, devices in ((2, "GPU-a"), (3, "")):
        said = ear.of(rank)
        assert (said["devices"], said["threads"], said["pulse"]) == (devices, "1", "1.0")
        assert said["comm"] == f"rank {rank}\n"
        comm = Path(f"/proc/{said['fork_server']}/comm").read_text()
        assert comm == "fork server\n"
    assert ear.of(2)["fork_server"] == ear.of(3)["fork_server"]


def test_large_messages_are_sent_in_pieces(ear: Ear) -> None:
    """A worker that reads slowly does not block its agent, and no message is lost."""
    text = "x" * 5_000_000
    ear.said.clear()
    ear.children.broadcast(echo(text))
    ear.children.broadcast(echo("short"))
    ear.until(lambda: len(ear.said) == 4)
    for rank in (2, 3):
        sizes = [text["size"] for which, text in ear.said if which == rank]
        assert sizes == [len(text), len("short")]
    assert all(set(said["echo"]) <= set("xshort") for _, said in ear.said)


def test_heartbeats_are_counted_and_not_forwarded(ear: Ear) -> None:
    ear.said.clear()
    ear.children.broadcast(echo("pulse"))
    ear.children.broadcast(echo("after"))
    ear.until(lambda: len(ear.said) == 2)
    assert {said["echo"] for _, said in ear.said} == {"after"}


def test_end_of_a_worker_is_reported_once(ear: Ear) -> None:
    ear.children.slots[0].send(leave(0))
    ear.until(lambda: bool(ear.ended))
    assert ear.ended == [Ended("rank 2 on n1", 0, 2)]
    assert not ear.children.all_ended()
    ear.children.broadcast(leave(0))  # messages to ended processes are dropped
    ear.until(lambda: len(ear.ended) == 2)
    assert ear.children.all_ended()


def test_death_is_reported_with_name_and_signal(ear: Ear) -> None:
    os.kill(ear.of(3)["pid"], signal.SIGKILL)
    ear.until(lambda: bool(ear.ended))
    assert ear.ended == [Ended("rank 3 on n1", -signal.SIGKILL, 3)]
    assert str(ear.ended[0]) == "rank 3 on n1 was ended by SIGKILL"


def test_last_messages_arrive_before_the_end_report(ear: Ear) -> None:
    """The last messages of a worker arrive no later than its end."""
    ear.said.clear()
    slot = ear.children.slots[0]
    slot.send(echo("last"))
    slot.send(leave(3))
    ear.until(lambda: bool(ear.ended))
    assert [said["echo"] for _, said in ear.said] == ["last"]
    assert str(ear.ended[0]) == "rank 2 on n1 exited with code 3"


def test_next_workers_use_the_same_fork_server(ear: Ear, tmp_path: Path) -> None:
    before = {rank: ear.of(rank) for rank in (2, 3)}
    ear.children.end()
    assert not any(alive(before[rank]["pid"]) for rank in (2, 3))
    assert all(alive(before[rank]["fork_server"]) for rank in (2, 3))
    for _ in range(3):
        ear.fork(tmp_path)
        for rank in (2, 3):
            assert ear.of(rank)["fork_server"] == before[rank]["fork_server"]
            assert ear.of(rank)["pid"] != before[rank]["pid"]
        ear.children.end()
    assert ear.ended == [], "those that were ended by us are not told"


def test_workers_end_if_their_fork_server_is_killed(ear: Ear, tmp_path: Path) -> None:
    said = ear.of(2)
    os.kill(said["fork_server"], signal.SIGKILL)
    ear.until(lambda: bool(ear.ended))
    assert [str(one) for one in ear.ended] == ["the fork server of host n1 was ended by SIGKILL"]
    assert [one.rank for one in ear.ended] == [None]
    wait_until("its workers to die", lambda: not any(alive(ear.of(rank)["pid"]) for rank in (2, 3)))
    ear.children.end()
    ear.fork(tmp_path)
    assert ear.of(2)["fork_server"] != said["fork_server"]


def test_workers_end_once_if_the_fork_server_died_in_the_same_turn(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the fork server drops the workers' pipes, whose own ends are in the same list."""
    selector, fork_server = ear.children._selector, ear.children.fork_server
    assert fork_server is not None
    os.kill(ear.of(2)["fork_server"], signal.SIGKILL)
    wait_until("its workers to die", lambda: not any(alive(ear.of(rank)["pid"]) for rank in (2, 3)))
    select = selector.select
    wait_until("all to be readable", lambda: len(select(0)) == 4, 60)
    monkeypatch.setattr(
        selector,
        "select",
        lambda timeout_s: sorted(select(timeout_s), key=lambda one: one[0].fd != fork_server.pidfd),
    )
    ear.until(lambda: bool(ear.ended))
    assert [str(one) for one in ear.ended] == ["the fork server of host n1 was ended by SIGKILL"]


def test_stopped_processes_are_killed(
    ear: Ear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server kills a stopped worker. A stopped fork server is killed with its workers, so
    that the next ones do not start next to them.
    """
    before = ear.of(2)
    os.kill(before["pid"], signal.SIGSTOP)
    ear.children.end()
    assert not alive(before["pid"])
    ear.fork(tmp_path)
    between, other = ear.of(2), ear.of(3)
    assert between["fork_server"] == before["fork_server"]
    os.kill(between["fork_server"], signal.SIGSTOP)
    monkeypatch.setattr(children_module, "END_TIMEOUT_S", 0.5)
    ear.children.end()
    pids = between["fork_server"], between["pid"], other["pid"]
    assert not any(map(alive, pids))
    ear.fork(tmp_path)
    assert ear.of(2)["fork_server"] != before["fork_server"]


@pytest.fixture
def slow(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> Ear:
    """Return workers that take longer to end than the fork server waits."""
    monkeypatch.setattr(children_module, "END_TIMEOUT_S", 0.2)
    return ear


@pytest.mark.parametrize("gpus", [0, 1])
def test_fork_server_is_kept_if_a_worker_ends_slowly(
    slow: Ear, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A worker may end slowly because the driver unpins tens of gigabytes or a file system does not
    answer. The agent renews its lease meanwhile.
    """
    slow.children.group = slow.children.group.model_copy(update={"gpus_per_worker": gpus})
    monkeypatch.setattr(children_module, "REPORT_S", 60.0)
    ended, ends = os.pipe()
    fork_server = slow.of(3)["fork_server"]
    os.kill(fork_server, signal.SIGSTOP)  # as if its worker had not ended yet
    monkeypatch.setattr(child_process, "kill_descendant", lambda pid, name: os.dup(ended))
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        if beats == 40:  # longer than a fork server may take to report
            os.kill(fork_server, signal.SIGCONT)
            os.close(ends)
            os.close(ended)

    slow.children.end(meanwhile=beat)
    assert beats >= 40
    assert not alive(slow.of(3)["pid"])
    assert alive(fork_server)


def test_close_ends_workers_and_fork_servers(children: Children, tmp_path: Path) -> None:
    ear = Ear(make_children(tmp_path))
    ear.fork(tmp_path)
    pids = [ear.of(rank)[key] for rank in (2, 3) for key in ("pid", "fork_server")]
    ear.children.close()
    assert not any(map(alive, pids))


def test_end_of_the_master_is_reported(ear: Ear, tmp_path: Path) -> None:
    with atomic.open_log(tmp_path / "master.log") as output:
        ear.children.start_master(1, output)
    assert ear.children.master is not None
    pid = ear.children.master.process.pid
    assert ear.children.master_runs
    os.kill(pid, signal.SIGKILL)
    ear.until(lambda: bool(ear.ended))
    assert ear.ended == [Ended("the master", -signal.SIGKILL, None)]
    assert not ear.children.master_runs
    ear.children.end()
    with atomic.open_log(tmp_path / "master.log") as output:
        ear.children.start_master(1, output)
    assert ear.children.master_runs
    ear.children.end()
    assert not ear.children.master_runs


def test_heartbeat_timeout_is_reported_for_known_workers(
    ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(ear.children._watch, "_clock", lambda: now)
    ear.children.silent()
    for _ in range(4):
        now += 1.0
        silent = ear.children.silent()
    assert sorted(rank for rank in silent if rank is not None) == [2, 3]
    assert ear.children.name(2) == "rank 2 on n1"
    assert ear.children.name(None) == "the master"
    ear.said.clear()
    ear.children.slots[0].send(echo("here"))
    ear.until(lambda: bool(ear.said))
    assert ear.children.silent() == [3]


def test_missing_worker_command_is_reported(
    paths: RunPaths, plans: Callable[..., Plan], tmp_path: Path
) -> None:
    identity = Identity("trainer", 0, 0, "n1", "41.0.0", "41_0", os.getpid())
    cluster = Cluster.model_validate({"slurm": {"container": "no-such-container exec"}})
    children = Children(paths, plans().groups[0], identity, cluster)
    with (
        atomic.open_log(tmp_path / "workers.log") as output,
        pytest.raises(EnvironmentFailure, match="no-such-container"),
    ):
        children.start_workers(["", ""], output)
    children.close()
