"""Another user of the machine writes into every port that a trial opens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.held import NO_LIMIT, Hold
from tests.support.trials import Site, processes, sft_config, wait_until

pytestmark = pytest.mark.long

POISON = r"""
import encodings.idna  # another user may not read it
import os
import socket
import struct
import sys
import threading
import time

HELLO, SET, COUNT = b"\0" + struct.pack("<I", 0x3C85F7CE), b"\1", b"\7"  # of torch's TCPStore
VALUES = (b"[]", b'["/etc", "/root"]')
KEYS = (b"/prepared data", b"/default_pg/0//cpu//0/0", b"/0//cpu//0/0", b"/0//cpu//0/1")

def text(data):
    return struct.pack("<Q", len(data)) + data

def poison(port):
    place = ("127.0.0.1", port)
    with socket.create_connection(place) as store, socket.create_connection(place) as garbage:
        garbage.sendall(VALUES[1] * 100)
        store.sendall(HELLO)
        while True:
            for value in VALUES:
                store.sendall(b"".join(SET + text(key) + text(value) for key in KEYS) + COUNT)
            if len(store.recv(8)) == 8:
                print(f"a store at {port}", flush=True)
            time.sleep(0.001)

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print("ready", flush=True)
for line in sys.stdin:
    threading.Thread(target=poison, args=(int(line),), daemon=True).start()
"""


@pytest.fixture
def attacker() -> Iterator[subprocess.Popen[str]]:
    """Run a process that sends invalid data to the ports that it reads. If the test runs as root,
    the process belongs to another user.
    """
    command = [sys.executable, "-c", POISON]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def listening(run: Path) -> set[int]:
    """The TCP ports on which processes of a run listen."""
    sockets = set()
    for pid in (pid for pids in processes(run).values() for pid in pids):
        try:
            sockets |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue  # it has ended
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]  # torch's TCPStore prefers IPv6
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()]
    rows = [line.split() for line in lines]
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


def test_trial_continues_while_another_user_writes_to_its_ports(
    tmp_path: Path, attacker: subprocess.Popen[str]
) -> None:
    site = Site(tmp_path)
    hold = Hold(site)
    hold.allow(3)
    path = site.write("sft.yaml", hold.sft(sft_config()))
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    run, found = site.paths("sft/1").run, set[int]()
    stdin: IO[str] | None = attacker.stdin
    assert stdin is not None

    def attacked() -> bool:
        for port in listening(run) - found:
            found.add(port)
            stdin.write(f"{port}\n")
            stdin.flush()
        return any(line["step"] >= 3 for line in site.metrics("sft/1"))

    wait_until("step 3", attacked)
    hold.allow(NO_LIMIT)
    ended = site.wait_for_end("sft/1")
    assert (ended["state"], ended["step"], ended["incarnation"]) == ("COMPLETED", 8, 1)
    assert found, "gloo listens"
    assert attacker.poll() is None
    attacker.kill()
    assert attacker.stdout is not None
    assert attacker.stdout.read() == "", "no port had a store"
