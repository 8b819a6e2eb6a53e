"""An agent's children: what they say, how they end, and messages larger than a pipe's buffer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmrl.channel.pipe import Connection
from slurmrl.errors import WorkerDiedError
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers import process
from slurmrl.workers.agent.children import Children, check
from slurmrl.workers.agent.identity import Identity

REPOSITORY = Path(__file__).parents[3]
STUB = """
import os, sys
from slurmrl.channel.pipe import Connection
pipe = Connection.from_fd(int(sys.argv[sys.argv.index("--pipe-fd") + 1]))
rank = int(sys.argv[sys.argv.index("--rank") + 1])
pipe.send({"rank": rank, "devices": os.environ["CUDA_VISIBLE_DEVICES"],
           "threads": os.environ["OMP_NUM_THREADS"]})
while (message := pipe.receive(60)) is not None:
    if message.get("exit") is not None:
        sys.exit(message["exit"])
    pipe.send({"rank": rank, "size": len(message["text"]), "echo": message["text"]})
"""
Turns = Callable[[Callable[[], bool]], None]


@pytest.fixture
def children(
    paths: RunPaths,
    plans: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Children]:
    """Host 1 of 2, with two stub workers: ranks 2 and 3."""
    (tmp_path / "stub_worker.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    spawn = process.spawn_with_pipe

    def spawn_stub(
        name: str, module: str, arguments: list[str], **more: Any
    ) -> tuple[process.Child, Connection]:
        assert module == "slurmrl.workers.worker"
        return spawn(name, "stub_worker", arguments, **more)

    monkeypatch.setattr(process, "spawn_with_pipe", spawn_stub)
    identity = Identity("trainer", 1, 0, "n1", "41.0", "41_0", os.getpid())
    found = Children(paths, plans(hosts=2).groups[0], identity)
    with process.open_log(tmp_path / "workers.log") as output:
        found.start_workers(["GPU-a", ""], None, output)
    yield found
    found.close()


class Ear:
    """Takes turns until enough has happened."""

    def __init__(self, children: Children) -> None:
        self.children = children
        self.heard: list[dict[str, Any]] = []
        self.ended: list[process.Child] = []

    def until(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not enough():
            assert time.monotonic() < deadline, (self.heard, self.ended)
            heard, ended = self.children.turn(0.05)
            self.heard += heard
            self.ended += ended


@pytest.fixture
def ear(children: Children) -> Ear:
    found = Ear(children)
    found.until(lambda: len(found.heard) == 2)
    return found


def test_workers_know_rank_devices_and_threads(ear: Ear) -> None:
    assert sorted(ear.heard, key=lambda message: int(message["rank"])) == [
        {"rank": 2, "devices": "GPU-a", "threads": "1"},
        {"rank": 3, "devices": "", "threads": "1"},
    ]


def test_large_messages_go_out_piece_by_piece(ear: Ear) -> None:
    """A worker that is slow to read does not block its agent, and nothing is lost."""
    text = "x" * 5_000_000
    ear.heard.clear()
    ear.children.broadcast({"text": text})
    ear.children.broadcast({"text": "short"})
    ear.until(lambda: len(ear.heard) == 4)
    for rank in (2, 3):
        sizes = [message["size"] for message in ear.heard if message["rank"] == rank]
        assert sizes == [len(text), len("short")]
    assert all(set(message["echo"]) <= set("xshort") for message in ear.heard)


def test_end_is_told_once(ear: Ear) -> None:
    ear.children.workers[0].pipe.send({"exit": 0})
    ear.until(lambda: bool(ear.ended))
    assert [child.name for child in ear.ended] == ["rank 2 on n1"]
    check(ear.ended)
    assert not ear.children.all_ended()
    ear.children.broadcast({"exit": 0})  # what goes to the dead is dropped
    ear.until(lambda: len(ear.ended) == 2)
    assert ear.children.all_ended()
    check(ear.ended)


def test_death_is_told_with_name_and_signal(ear: Ear) -> None:
    os.kill(ear.children.workers[1].child.process.pid, signal.SIGKILL)
    ear.until(lambda: bool(ear.ended))
    with pytest.raises(WorkerDiedError, match="rank 3 on n1 was ended by SIGKILL"):
        check(ear.ended)


def test_exit_code_is_told(ear: Ear) -> None:
    ear.children.workers[0].pipe.send({"exit": 5})
    ear.until(lambda: bool(ear.ended))
    with pytest.raises(WorkerDiedError, match="rank 2 on n1 exited with code 5"):
        check(ear.ended)


def test_last_words_come_before_the_end(ear: Ear) -> None:
    """What a worker said before it died is heard no later than that it died."""
    ear.heard.clear()
    worker = ear.children.workers[0]
    worker.pipe.send({"text": "last"})
    worker.pipe.send({"exit": 3})
    ear.until(lambda: bool(ear.ended))
    assert [message["echo"] for message in ear.heard] == ["last"]


def test_close_ends_what_runs(ear: Ear) -> None:
    ear.children.close()
    codes = [worker.child.process.returncode for worker in ear.children.workers]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    ear.children.workers.clear()
