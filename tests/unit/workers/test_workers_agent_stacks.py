"""Stacks of processes that do not answer, as py-spy reads them from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmrl.workers.agent import witness
from slurmrl.workers.child_process import own_stacks
from tests.support.trials import wait_until

HEAD = """\
Process 25670: python -c def spins(): ...
Python v3.11.7 (/opt/python/bin/python3.11)

"""
NATIVE = f"""{HEAD}Thread 25670 (idle): "MainThread"
    clock_nanosleep (libc.so.6)
    0x7f3b2ee5ff7a (libffi.so.8.1.2)
    PyCFuncPtr_call (_ctypes.c:4201)
    blocked (/code/my reward.py:4)
    <module> (/code/train.py:5)
Thread 25671 (idle): "pulse"
    beat (pulse.py:70)
"""
PYTHON = f"""{HEAD}Thread 25670 (idle)
    waits (<string>:3)
    <module> (<string>:4)
"""
FAKE = """\
#!/bin/sh
case "$2 $FAKE" in
    "--native broken") echo "Error: frame not found" >&2; exit 1;;
    *denied) printf 'Permission Denied: Try again\\nmore\\n' >&2; exit 1;;
    --native*) echo native;;
    --nonblocking*) echo python;;
esac
"""


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for py-spy next to the interpreter, like pip, and not on PATH."""
    program = tmp_path / "py-spy"
    program.write_text(FAKE)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.mark.parametrize(
    ("state", "fake", "expected"),
    [
        ("S", "", "Seen by py-spy:\nnative\n"),
        ("S", "broken", "Seen by py-spy:\npython\n"),
        ("T", "", "Seen by py-spy:\npython\n"),
        ("D", "", "Seen by py-spy:\npython\n"),
        (
            "R",
            "denied",
            "(py-spy cannot read the process: Permission Denied: Try again; kernel.yama",
        ),
    ],
)
def test_c_frames_are_shown_if_the_process_can_be_paused(
    py_spy: None, monkeypatch: pytest.MonkeyPatch, state: str, fake: str, expected: str
) -> None:
    monkeypatch.setenv("FAKE", fake)
    assert witness._py_spy(1, state, time.monotonic() + 60).startswith(expected)


def test_py_spy_gets_at_most_the_remaining_time(py_spy: None) -> None:
    assert "did not finish in time" in witness._py_spy(1, "S", time.monotonic() - 1)


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        (f"(rank 0 did not answer)\n{witness.SEEN}{NATIVE}", "my reward.py:4 in blocked"),
        (f"(rank 0 did not answer)\n{witness.SEEN}{PYTHON}", "<string>:3 in waits"),
        ("(rank 0 did not answer)\n(py-spy cannot read the process: Permission Denied)\n", ""),
    ],
)
def test_frame_of_an_unresponsive_process_is_shown(text: str, frame: str) -> None:
    assert witness.top_frame(text) == frame


@pytest.fixture
def blocked() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits in C and holds the interpreter lock."""
    code = "import ctypes\ndef blocked():\n    ctypes.PyDLL(None).sleep(600)\nprint(); blocked()"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until("the process to wait", lambda: witness._state(process.pid) == "S")
        yield process
        process.kill()


@pytest.mark.skipif(
    shutil.which("py-spy") is None and not Path(sys.executable).with_name("py-spy").exists(),
    reason="py-spy is optional",
)
def test_real_py_spy_shows_stacks(blocked: subprocess.Popen[bytes]) -> None:
    """py-spy shows C and Python frames of a running process, and Python frames of a stopped
    process.
    """
    seen = witness._py_spy(blocked.pid, "S", time.monotonic() + 60)
    assert "nanosleep (libc" in seen
    assert witness.top_frame(seen) == "<string>:3 in blocked"
    os.kill(blocked.pid, signal.SIGSTOP)
    wait_until("the process to stop", lambda: witness._state(blocked.pid) == "T")
    seen = witness._py_spy(blocked.pid, "T", time.monotonic() + 60)
    assert witness.top_frame(seen) == "<string>:3 in blocked"


def test_agent_shows_stacks_of_its_own_threads() -> None:
    ended = threading.Event()

    def beats_a_lease() -> None:
        ended.wait(60)

    thread = threading.Thread(target=beats_a_lease)
    thread.start()
    try:
        text = own_stacks(1 << 16)
    finally:
        ended.set()
        thread.join()
    assert "in beats_a_lease\n" in text
    assert "in test_agent_shows_stacks_of_its_own_threads\n" in text
