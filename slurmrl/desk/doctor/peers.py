"""Requests between the hosts of the short job, and what is measured with them.

A host reports its time, creates a file in the shared directory, or waits until it sees one. One
request per connection, one line of JSON each way.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.primitives import write_new

CONNECT_S: Final = 5.0
POLL_S: Final = 0.005
LONGEST_DELAY_S: Final = 10.0
"""How long a host looks for a file that exists. NFS may cache for up to 60 s that a file is
missing; a delay above this value is reported without waiting for its end."""
MOST_BYTES: Final = 65536
_NAME: Final = re.compile(r"file\.\d+\.\d+")

Host = Callable[[str, str], dict[str, Any]]
"""Executes a request (what to do, the name of a file): `act` on this host, `ask` on another."""


class _Listener(socketserver.ThreadingTCPServer):
    request_queue_size = 256
    """All hosts of a job connect at about the same time."""
    daemon_threads = True


class Server:
    """Answers requests that carry the token, in threads of its own."""

    def __init__(self, folder: Path, token: str, address: str) -> None:
        self.has_connected = threading.Event()
        """Set once this host has connected to all others."""
        self.said_bye = threading.Event()
        outer, self._folder, self._token = self, folder, token

        class Handler(socketserver.StreamRequestHandler):
            timeout = LONGEST_DELAY_S + CONNECT_S

            def handle(self) -> None:
                reply = outer.answer(self.rfile.readline(MOST_BYTES))
                self.wfile.write(json.dumps(reply).encode() + b"\n")

        self._server = _Listener((address, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def answer(self, line: bytes) -> dict[str, Any]:
        """The reply to a request. Errors are replies too; the asking host reports them."""
        try:
            request = json.loads(line)
            if not hmac.compare_digest(str(request["token"]), self._token):
                return {"error": "wrong token"}
            if request["do"] == "wait" and not self.has_connected.wait(LONGEST_DELAY_S):
                return {"error": "is still connecting to other hosts"}
            if request["do"] == "bye":
                self.said_bye.set()
            return act(self._folder, str(request["do"]), str(request.get("name", "")))
        except (LookupError, TypeError, ValueError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def act(folder: Path, do: str, name: str) -> dict[str, Any]:
    """Execute a request on this host. Raises ValueError, OSError."""
    if do in ("time", "wait", "bye"):
        return {"time": time.time()}
    if not _NAME.fullmatch(name):
        raise ValueError(f"file name {name!r} is not allowed, only file.N.N")
    path = folder / name
    if do == "miss":
        return {"there": path.exists()}
    if do == "make":
        data = name.encode() * 100
        write_new(path, data, True, REAL)
        return {"digest": hashlib.sha256(data).hexdigest()}
    if do == "see":
        return see(path)
    raise ValueError(f"unknown request {do!r}")


def see(path: Path) -> dict[str, Any]:
    """Wait for a file; return the seconds until it was visible and the digest of its content.

    The seconds are None if it was not visible within LONGEST_DELAY_S.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < LONGEST_DELAY_S:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            time.sleep(POLL_S)
            continue
        return {"delay_s": waited_s, "digest": hashlib.sha256(data).hexdigest()}
    return {"delay_s": None, "digest": ""}


def ask(address: str, token: str, do: str, name: str = "") -> dict[str, Any]:
    """Send a request to the server at ``host:port``.

    Raises OSError where it cannot be reached, EnvironmentFailure where it reports an error.
    """
    host, _, port = address.rpartition(":")
    timeout_s = CONNECT_S if do in ("time", "bye") else LONGEST_DELAY_S + CONNECT_S
    with socket.create_connection((host, int(port)), CONNECT_S) as connection:
        connection.settimeout(timeout_s)
        request = {"token": token, "do": do, "name": name}
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as reader:
            line = reader.readline(MOST_BYTES)
    try:
        reply: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise EnvironmentFailure(f"{address} sent no JSON: {line[:100]!r}") from error
    if "error" in reply:
        raise EnvironmentFailure(f"{address}: {reply['error']}")
    return reply


def clock_offset(other: Host) -> tuple[float, float]:
    """Return how far the other host's clock is ahead of ours, and the error bound, in seconds.

    The bound is half of the round trip. The smallest round trip of five counts (Cristian 1989).
    """
    best = (0.0, float("inf"))
    for _ in range(5):
        began_wall, began = time.time(), time.monotonic()
        theirs = other("time", "")["time"]
        half = (time.monotonic() - began) / 2
        if half < best[1]:
            best = (theirs - (began_wall + half), half)
    return best


@dataclass(frozen=True)
class FileDelay:
    seconds: float | None
    """None: not visible within LONGEST_DELAY_S."""
    same_content: bool
    """Whether the reader read what was written; True where it read nothing."""


def file_delay(maker: Host, reader: Host, name: str) -> FileDelay:
    """How long after ``maker`` has created a file ``reader`` sees it, by the reader's clock.

    The reader looks for the file first, so that its cache knows it as missing.
    """
    reader("miss", name)
    made = maker("make", name)
    seen = reader("see", name)
    return FileDelay(seen["delay_s"], seen["delay_s"] is None or seen["digest"] == made["digest"])
