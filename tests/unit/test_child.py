"""Child processes with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmrl import child
from tests.support.trials import alive, wait_until

REPLIES = """
import os, subprocess, sys, time
from slurmrl import child

print("printed by an import", flush=True)

def replies(request):
    print("other output", flush=True)
    sleeper = subprocess.Popen(["sleep", "600"])
    yield {"size": len(request["text"]), "sleeper": sleeper.pid}
    eval(request["then"])
    yield {"done": True}

child.answer(replies)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "answering.py").write_text(REPLIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "answering"


@pytest.mark.parametrize(
    ("then", "limit_s", "code", "done", "last_line"),
    [
        ("None", 600, 0, True, "other output"),
        ("sys.exit('broken')", 600, 1, False, "broken"),
        ("os._exit(7)", None, 7, False, "other output"),
        ("time.sleep(600)", 5, None, False, "other output"),
    ],
)
def test_request_yields_replies_and_kills_the_process_group(
    module: str, then: str, limit_s: float | None, code: int | None, done: bool, last_line: str
) -> None:
    text = "x" * 2**20  # more than a pipe holds
    request = child.ChildRequest(module, {"text": text, "then": then}, limit_s=limit_s)
    first, *more = list(request)
    assert (first["size"], more) == (2**20, [{"done": True}] if done else [])
    assert (request.ended.code, request.ended.last_line) == (code, last_line)
    wait_until("its end", lambda: not alive(first["sleeper"]))


def test_request_kills_its_child_if_the_caller_stops_reading(module: str) -> None:
    replies = iter(child.ChildRequest(module, {"text": "", "then": "time.sleep(600)"}))
    first = next(replies)
    replies.close()  # type: ignore[attr-defined]
    wait_until("its end", lambda: not alive(first["sleeper"]))


@pytest.mark.parametrize(
    ("code", "limit_s", "ended"),
    [
        ("print('no'); raise SystemExit('reason')", 600, child.ChildEnd(1, "reason")),
        ("import os; os.kill(os.getpid(), 9)", 600, child.ChildEnd(-9)),
        ("import time; time.sleep(600)", 0.1, child.ChildEnd(None)),
    ],
)
def test_run_returns_exit_code_and_output(code: str, limit_s: float, ended: child.ChildEnd) -> None:
    assert child.run([sys.executable, "-c", code], limit_s) == ended


def test_run_keeps_the_beginning_of_the_output() -> None:
    command = [sys.executable, "-c", "print('x' * 10**6)"]
    assert child.run(command, 600, kept_bytes=3) == child.ChildEnd(0, output=b"xxx")
    assert child.run(command, 600).output == b""


def test_child_starts_with_no_signal_blocked() -> None:
    code = "import signal; assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert child.run([sys.executable, "-c", code], 600) == child.ChildEnd(0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_child_dies_with_its_parent(module: str) -> None:
    code = """
import sys
from slurmrl import child
for reply in child.ChildRequest("answering", {"text": "", "then": "print(os.getpid(), flush=True), time.sleep(600)"}, shown=True):
    pass
"""  # noqa: E501
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        parent.stderr.readline()
        pid = int(parent.stderr.readline())
        parent.kill()
        parent.stderr.close()
    wait_until(f"the end of {pid}", lambda: not alive(pid))
