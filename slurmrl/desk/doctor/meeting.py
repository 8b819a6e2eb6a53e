"""Checks between the hosts of the short job: connections, clocks, delay of the directory.

A host answers requests: it reports its time, creates a file, or waits until it sees a file. Each
connection carries one request and one reply, each a line of JSON.
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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from slurmrl.desk.doctor import Check, failed, ok, warning
from slurmrl.desk.doctor.directory import seconds
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, write_new
from slurmrl.run.channel.wakeups import fabric_address, interface_of

MEET_S = 15.0
"""Seconds that hosts wait for each other's addresses."""
BYE_S = 5.0
SLOW_DELAY_S = 2.0
AT_ONCE = 16
MOST_PEERS = 64
"""Maximum number of hosts to which a host connects: its successors in a ring of all hosts."""
NETWORK_ADVICE = (
    "set cluster.interface to an interface on which all hosts reach each other (see 'interface'), "
    "or have the firewall between compute nodes opened"
)
DELAY_ADVICE = (
    "the hosts cache the absence of files: runs work, but react late; mount the directory with "
    "lookupcache=positive or a small acdirmin/acdirmax"
)
CONNECT_S: Final = 5.0
POLL_S: Final = 0.005
LONGEST_DELAY_S: Final = 10.0
"""Maximum seconds that a host searches for a file that exists. NFS may cache for up to 60 s that a
file is missing; a longer delay is reported without waiting for its end."""
MOST_BYTES: Final = 65536
_NAME: Final = re.compile(r"file\.\d+\.\d+")


@dataclass(frozen=True)
class ProbeHost:
    """This host of the job, with the facts that connect it to the other hosts."""

    folder: Path
    token: str
    task: int
    hosts: int
    interface: str | None


def meet_hosts(host: ProbeHost) -> list[Check]:
    """Run all checks of one host; only the first host measures between pairs of hosts."""
    own = fabric_address(host.interface, host.hosts)
    checks = [ok("interface", f"{interface_of(own)} at {own}; there are: {_interfaces()}")]
    if host.hosts == 1:
        return checks
    server = Server(host.folder, host.token, own)
    try:
        atomic.replace(_address(host, host.task), f"{own}:{server.port}".encode())
        known, waited_s = _wait_for_addresses(host)
        checks.append(_met(host, known, waited_s))
        checks.append(_connections(host, known))
        server.has_connected.set()
        others = {task: address for task, address in known.items() if task != host.task}
        if host.task == 0:
            checks += _pairs(host, others)
            _part(host, others)
        else:
            _wait_for_bye(host, server)
    finally:
        server.close()
    return checks


def _wait_for_addresses(host: ProbeHost) -> tuple[dict[int, str], float]:
    known: dict[int, str] = {}
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < MEET_S and len(known) < host.hosts:
        for task in set(range(host.hosts)) - set(known):
            try:
                known[task] = atomic.read(_address(host, task)).decode()
            except FileNotFoundError:
                continue
        if len(known) < host.hosts:
            time.sleep(0.05)
    return known, waited_s


def _met(host: ProbeHost, known: Mapping[int, str], waited_s: float) -> Check:
    missing = sorted(set(range(host.hosts)) - set(known))
    if missing:
        names = ", ".join(map(str, missing))
        measured = f"no file of host {names} of {host.hosts} was visible within {MEET_S:.0f} s"
        advice = "mount the same directory at the same path on every host; see the job's log"
        return failed("hosts meet", measured, advice)
    measured = f"{host.hosts} hosts found each other in {seconds(waited_s)}"
    return ok("hosts meet", measured, waited_s=waited_s)


def _connections(host: ProbeHost, known: Mapping[int, str]) -> Check:
    ring = [(host.task + step) % host.hosts for step in range(1, host.hosts)]
    others = [task for task in ring if task in known][:MOST_PEERS]
    problems = []
    for task in others:
        try:
            ask(known[task], host.token, "time")
        except OSError as error:
            problems.append(f"{known[task]}: {error.strerror or error}")
    if problems:
        return failed("connections", "cannot reach " + "; ".join(problems), NETWORK_ADVICE)
    return ok("connections", f"reaches the {len(others)} other host{'s' * (len(others) > 1)}")


def _pairs(host: ProbeHost, others: Mapping[int, str]) -> list[Check]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda item: _pair(host, *item), others.items())
        return [check for pair in results for check in pair]


def _pair(host: ProbeHost, task: int, address: str) -> list[Check]:
    name = f"0 and {task} ({address.rpartition(':')[0]})"
    here, other = partial(act, host.folder), partial(ask, address, host.token)
    try:
        offset_s, within_s = clock_offset(other)
        clock = ok(
            "clock difference",
            f"host {name}: {offset_s * 1e3:+.1f} ms, accurate to {within_s * 1e3:.1f} ms",
            offset_s=offset_s,
            within_s=within_s,
        )
        return [clock, _delays(here, other, task, name)]
    except OSError as error:
        return [failed("directory between hosts", f"host {name}: {error}", NETWORK_ADVICE)]


def _delays(here: Host, other: Host, task: int, name: str) -> Check:
    """Check the delay until a host sees a new file of the other host, in both directions."""
    delays = {
        "there_s": file_delay(here, other, f"file.{task}.0"),
        "back_s": file_delay(other, here, f"file.{task}.1"),
    }
    if not all(delay.same_content for delay in delays.values()):
        return failed(
            "directory between hosts",
            f"host {name}: one host cannot read the other host's files",
            "the hosts do not share one directory, or a host reads stale data: choose another root",
        )
    shown = " and ".join(_shown(delay.seconds) for delay in delays.values())
    measured = f"host {name}: a new file is visible after {shown}"
    numbers = {key: one.seconds for key, one in delays.items() if one.seconds is not None}
    if len(numbers) < len(delays):
        return failed("directory between hosts", measured, DELAY_ADVICE, **numbers)
    if max(numbers.values()) > SLOW_DELAY_S:
        return warning("directory between hosts", measured, DELAY_ADVICE, **numbers)
    return ok("directory between hosts", measured, **numbers)


def _shown(value: Any) -> str:
    return f"more than {LONGEST_DELAY_S:.0f} s" if value is None else seconds(value)


def _part(host: ProbeHost, others: Mapping[int, str]) -> None:
    """Let the other hosts end once all of them have connected to each other."""
    for word in ("wait", "bye"):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(_tell, host, word), others.values()))
    atomic.replace(host.folder / "bye", b"")


def _tell(host: ProbeHost, word: str, address: str) -> None:
    try:
        ask(address, host.token, word)
    except OSError:
        return  # Another check has reported this host, whose wait has a time limit.


def _wait_for_bye(host: ProbeHost, server: Server) -> None:
    """Serve the first host until it says bye, over the network or in the directory."""
    deadline = time.monotonic() + 2 * LONGEST_DELAY_S + BYE_S
    while time.monotonic() < deadline and not server.said_bye.wait(0.2):
        if (host.folder / "bye").exists():
            return


def _address(host: ProbeHost, task: int) -> Path:
    return host.folder / f"address.{task}"


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())


Host = Callable[[str, str], dict[str, Any]]
"""Function that executes a request (an action, a file name), such as `act` or `ask`."""


class _Listener(socketserver.ThreadingTCPServer):
    request_queue_size = 256
    """The queue must hold all hosts of a job, which connect at about the same time."""
    daemon_threads = True


class Server:
    """Answers requests that carry the token, in separate threads."""

    def __init__(self, folder: Path, token: str, address: str) -> None:
        self.has_connected = threading.Event()
        """Set once this host has connected to all other hosts."""
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
        """Return the reply to a request. The requesting host reports errors in replies."""
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
        raise ValueError(f"file name {name!r} is not allowed; expected file.N.N")
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

    The seconds are None if the file was not visible within LONGEST_DELAY_S.
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

    Raises OSError if the server cannot be reached, EnvironmentFailure if it reports an error.
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
    """Return how far the other host's clock is ahead, and the error bound, both in seconds.

    The bound is half of the shortest of five round trips (Cristian 1989).
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
    """Seconds until the file was visible; None if it was not within LONGEST_DELAY_S."""
    same_content: bool
    """Whether the reader read the written content; True if it read no file."""


def file_delay(maker: Host, reader: Host, name: str) -> FileDelay:
    """Measure the time, by the reader's clock, until ``reader`` sees a new file of ``maker``.

    The reader first looks for the missing file, so that its file-system cache records the absence.
    """
    reader("miss", name)
    made = maker("make", name)
    seen = reader("see", name)
    return FileDelay(seen["delay_s"], seen["delay_s"] is None or seen["digest"] == made["digest"])
