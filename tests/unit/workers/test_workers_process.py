"""Children end with their parent, ignore Slurm's signals, and get end-of-file from their pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers import child_process
from tests.support.trials import alive, wait_until

HERE = Path(__file__).parents[3]
CHILD = """
import os, signal, sys
from slurmrl.run.channel.pipe import Connection
pipe = Connection.from_fd(int(sys.argv[sys.argv.index("--pipe-fd") + 1]))
ignored = [n for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN]
pipe.send({"pid": os.getpid(), "ignored": [int(n) for n in ignored], "arguments": sys.argv[1:3]})
while (message := pipe.receive(60)) is not None:
    pipe.send({"heard": message, "fd": pipe.take_fd() is not None})
sys.exit(7 if pipe.closed else 1)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stub_child.py").write_text(CHILD)
    return {**os.environ, "PYTHONPATH": f"{HERE}:{tmp_path}"}


@contextmanager
def spawned(
    tmp_path: Path, environment: dict[str, str]
) -> Iterator[tuple[child_process.Child, Connection]]:
    with atomic.open_log(tmp_path / "logs" / "child.log") as output:
        child, pipe = child_process.spawn_with_pipe(
            "the child", "stub_child", ["one", "two"], output=output, environment=environment
        )
    try:
        yield child, pipe
    finally:
        child.close()
        pipe.close()


def test_child_has_its_arguments_and_ignores_signals(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with spawned(tmp_path, environment) as (child, pipe):
        hello = pipe.receive(60)
        assert hello is not None, (tmp_path / "logs" / "child.log").read_text()
        assert hello["arguments"] == ["one", "two"]
        assert set(hello["ignored"]) >= {int(number) for number in child_process.IGNORED}
        for number in child_process.IGNORED:
            os.kill(child.process.pid, number)
        pipe.send({"still": "there"})
        assert pipe.receive(60) == {"heard": {"still": "there"}, "fd": False}
        assert child.ended() is None
    assert child.process.returncode == -signal.SIGKILL
    assert child.ending() == "the child was ended by SIGKILL"


def test_child_sees_the_end_of_its_pipe(tmp_path: Path, environment: dict[str, str]) -> None:
    """No other process holds the parent's end, not even a child that was started later."""
    with spawned(tmp_path, environment) as (child, pipe), spawned(tmp_path, environment):
        assert pipe.receive(60) is not None
        pipe.close()
        assert child.process.wait(timeout=60) == 7
        assert child.ending() == "the child exited with code 7"


def test_descriptor_reaches_the_child(tmp_path: Path, environment: dict[str, str]) -> None:
    with spawned(tmp_path, environment) as (_, pipe), (tmp_path / "any").open("wb") as file:
        pipe.send_with_fds({"take": "this"}, file.fileno())
        assert pipe.receive(60) is not None
        assert pipe.receive(60) == {"heard": {"take": "this"}, "fd": True}


def test_log_is_private_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "0.0.log"
    for text in (b"one\n", b"two\n"):
        with atomic.open_log(path) as output:
            output.write(text)
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_command_that_cannot_be_executed_is_reported(tmp_path: Path) -> None:
    with (
        atomic.open_log(tmp_path / "log") as output,
        pytest.raises(EnvironmentFailure, match="cannot start rank 0 with 'no-such-container'"),
    ):
        child_process.spawn(
            "rank 0",
            "json",
            [],
            output=output,
            environment=os.environ,
            interpreter=["no-such-container", "exec", "python3"],
        )


PARENT = """
import os, sys, time
from pathlib import Path
from slurmrl.display.terminal import signal_name
from slurmrl.fsio import atomic
from slurmrl.workers import child_process
with atomic.open_log(Path(sys.argv[1])) as output:
    options = {"output": output, "environment": os.environ}
    child = child_process.spawn("the child", "stub_sleeper", [], **options)
print(child.process.pid, flush=True)
time.sleep(600)
"""


def test_child_dies_with_its_parent(tmp_path: Path, environment: dict[str, str]) -> None:
    """Also covers a child that never reads its pipe."""
    (tmp_path / "stub_sleeper.py").write_text(
        "import time\nprint('up', flush=True)\ntime.sleep(600)"
    )
    log = tmp_path / "child.log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as output:
        try:
            child = int(output.readline())
            wait_until("the child", lambda: log.read_text() == "up\n", timeout_s=60)
            assert alive(child)
        finally:
            parent.kill()
            parent.wait()
    wait_until("the child to die", lambda: not alive(child), timeout_s=60)


def test_child_exits_if_its_parent_is_already_dead(tmp_path: Path) -> None:
    """The parent may end before the child requests the signal at its parent's death, which would
    then never come.
    """
    code = (
        "import os\n"
        "from slurmrl.workers.child_process import die_with\n"
        "die_with(os.getppid() + 1)\n"
        "print('survived')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_children_are_ended_together_within_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process in a blocked system call cannot be ended. Here, its kill has no effect."""
    held, other = (
        child_process.Child(name, subprocess.Popen(["sleep", "600"])) for name in ("held", "other")
    )
    monkeypatch.setattr(held, "kill", lambda: None)
    try:
        child_process.close_all([held, other], timeout_s=2.0)
        assert held.ended() is None
        assert other.process.returncode == -signal.SIGKILL
    finally:
        held.process.kill()
        held.process.wait()
