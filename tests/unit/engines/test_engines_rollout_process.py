"""Start and end of server processes, with small programs instead of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurmrl.rollouts.generation.process import HostFolder, ServerProcess, ServerProgram
from slurmrl.rollouts.generation.warden import LIST, descendants
from tests.support.trials import alive

DEADLINE_S = 60.0
FAMILY = """
import os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
memory = SharedMemory(create=True, size=64, name=f"slurmrl_test_{os.getpid()}")
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleeper, start_new_session=True)  # a daemon
child = subprocess.Popen(sleeper)
folder = Path(sys.argv[1])
for name, pid in (("daemon", own.pid), ("child", child.pid), ("server", os.getpid())):
    (folder / f".{name}").write_text(str(pid))
    (folder / f".{name}").rename(folder / name)
print("last words", flush=True)
time.sleep(600)
"""
MAPPING = """
import mmap, os, sys, time
from multiprocessing import get_context
lock = get_context("spawn").Lock()
with open(f"/dev/shm/sglang_loads_{os.getpid()}_test.shm", "w+b") as file:
    file.write(b"0" * 4096)
    file.flush()
    held = mmap.mmap(file.fileno(), 4096)
with open(sys.argv[1] + "/.left", "w") as file:
    file.write(f"sem.{lock._semlock.name[1:]} sglang_loads_{os.getpid()}_test.shm")
os.rename(sys.argv[1] + "/.left", sys.argv[1] + "/left")
time.sleep(600)
"""
OWNER = """
import sys, time
from pathlib import Path
from tests.unit.engines.test_engines_rollout_process import start
process = start(Path(sys.argv[1]))
time.sleep(600)
"""


def program(folder: Path, code: str = FAMILY) -> ServerProgram:
    return ServerProgram(
        name="server 0",
        command=[sys.executable, "-c", code, str(folder)],
        environment=os.environ,
        log=folder / "logs" / "server.log",
    )


def start(folder: Path) -> ServerProcess:
    return ServerProcess(program(folder))


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


def family(folder: Path) -> dict[str, int]:
    """Wait until the server, its child and its daemon run. Return their pids."""
    names = ("server", "child", "daemon")
    wait_for("the server's processes", lambda: all((folder / name).exists() for name in names))
    return {name: int((folder / name).read_text()) for name in names}


def shared_memory(pids: dict[str, int]) -> Path:
    """Return the shared memory of the server."""
    return Path("/dev/shm", f"slurmrl_test_{pids['server']}")


def wait_for_ends(pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        wait_for(f"the end of the {name}", lambda pid=pid: not alive(pid))  # type: ignore[misc]


def test_close_ends_every_process_of_a_server_including_daemons(tmp_path: Path) -> None:
    process = start(tmp_path)
    pids = family(tmp_path)
    assert shared_memory(pids).exists()
    process.close()
    assert [name for name, pid in pids.items() if alive(pid)] == []
    assert not shared_memory(pids).exists()
    assert (tmp_path / "logs" / "server.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("killed", ["owner", "server"])
def test_no_server_process_outlives_a_kill(tmp_path: Path, killed: str) -> None:
    with (tmp_path / "owner.log").open("wb") as output:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stderr=output)
    try:
        pids = family(tmp_path)
        os.kill({"owner": owner.pid, **pids}[killed], signal.SIGKILL)
        wait_for_ends(pids)
        wait_for("the end of its shared memory", lambda: not shared_memory(pids).exists())
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.parametrize("killed", ["nothing", "server", "everything"])
def test_only_shared_memory_of_the_server_is_removed(tmp_path: Path, killed: str) -> None:
    """A new folder on the host also removes folders of killed servers."""
    folder, temporary = HostFolder(tmp_path), "tmp"
    (folder.path / temporary).mkdir()
    other = Path(f"/dev/shm/sglang_loads_{os.getpid()}_other.shm")
    other.write_bytes(b"0" * 4096)
    environment = {**os.environ, "TMPDIR": str(folder.path / temporary)}
    process = ServerProcess(replace(program(tmp_path, MAPPING), environment=environment))
    try:
        wait_for("its files", (tmp_path / "left").exists)
        left = [Path("/dev/shm", name) for name in (tmp_path / "left").read_text().split()]
        assert [path.name[:7] for path in left] == ["sem.mp-", "sglang_"]
        listed = folder.path / temporary / LIST
        if killed != "nothing":
            wait_for("the list", lambda: listed.exists() and len(listed.read_text().split()) == 4)
        if killed == "everything":
            os.kill(process._warden.pid, signal.SIGKILL)
            wait_for("the end", lambda: process.ended)
            assert left[1].exists()
            os.close(folder._descriptor)  # as after a kill of this process
            HostFolder(tmp_path).close()
        elif killed == "server":
            (server,) = descendants(str(process._warden.pid))[:1]
            os.kill(int(server), signal.SIGKILL)
            wait_for("the end", lambda: process.ended)
        process.close()
        assert [path for path in left if path.exists()] == []
        assert other.exists()
    finally:
        process.close()
        other.unlink()


def test_server_ends_if_its_supervisor_is_killed(tmp_path: Path) -> None:
    """The kernel ends the server, and closing ends the other processes of its session. (The fork
    server adopts a daemon, and kills it after the worker.)
    """
    process = start(tmp_path)
    pids = family(tmp_path)
    warden = int(Path(f"/proc/{pids['server']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(warden, signal.SIGKILL)
    wait_for("the end of the warden", lambda: process.ended)
    wait_for("the end of the server", lambda: not alive(pids["server"]))
    process.close()
    os.kill(pids.pop("daemon"), signal.SIGKILL)
    wait_for_ends(pids)
    shared_memory(pids).unlink(missing_ok=True)  # its resource tracker may have ended with the rest


def test_report_of_an_ended_server_quotes_its_last_output(tmp_path: Path) -> None:
    first = start(tmp_path)
    pids = family(tmp_path)
    os.kill(pids["server"], signal.SIGKILL)
    wait_for("the end", lambda: first.ended)
    assert "server 0 ended (SIGKILL)" in first.ending()
    assert "last words" in str(first.last_words())
    first.close()
    failing = ServerProcess(program(tmp_path, "import sys; print('no such flag'); sys.exit(3)"))
    wait_for("the end", lambda: failing.ended)
    assert "exited with code 3" in failing.ending()
    assert "no such flag" in str(failing.last_words())
    assert "last words" not in str(failing.last_words())
    failing.close()
