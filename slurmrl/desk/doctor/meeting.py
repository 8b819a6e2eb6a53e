"""Checks between the hosts of the short job: connections, clocks, delay of the directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl.desk.doctor import peers
from slurmrl.desk.doctor.check import Check, failed, ok, warning
from slurmrl.desk.doctor.directory import seconds
from slurmrl.desk.doctor.peers import LONGEST_DELAY_S, ask
from slurmrl.fsio import atomic
from slurmrl.run.channel.bell import fabric_address, interface_of

MEET_S = 15.0
"""How long hosts wait for each other's addresses."""
BYE_S = 5.0
SLOW_DELAY_S = 2.0
AT_ONCE = 16
MOST_PEERS = 64
"""With more hosts, each host connects to this many successors in a ring."""
NETWORK_ADVICE = (
    "set cluster.interface to an interface on which all hosts reach each other (see 'interface'), "
    "or have the firewall between compute nodes opened"
)
DELAY_ADVICE = (
    "the directory's clients cache that a file is missing: runs work, but react late; "
    "mount it with lookupcache=positive or a small acdirmin/acdirmax"
)


@dataclass(frozen=True)
class ProbeHost:
    """This host among those of the job."""

    folder: Path
    token: str
    task: int
    hosts: int
    interface: str | None


def check(host: ProbeHost) -> list[Check]:
    """All checks of one host; only the first host measures between pairs of hosts."""
    own = fabric_address(host.interface, host.hosts)
    checks = [ok("interface", f"{interface_of(own)} at {own}; there are: {_interfaces()}")]
    if host.hosts == 1:
        return checks
    server = peers.Server(host.folder, host.token, own)
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
    here, other = partial(peers.act, host.folder), partial(ask, address, host.token)
    try:
        offset_s, within_s = peers.clock_offset(other)
        clock = ok(
            "clock difference",
            f"host {name}: {offset_s * 1e3:+.1f} ms within {within_s * 1e3:.1f} ms",
            offset_s=offset_s,
            within_s=within_s,
        )
        return [clock, _delays(here, other, task, name)]
    except OSError as error:
        return [failed("directory between hosts", f"host {name}: {error}", NETWORK_ADVICE)]


def _delays(here: peers.Host, other: peers.Host, task: int, name: str) -> Check:
    """Delay until a new file of one host is visible on the other, in both directions."""
    delays = {
        "there_s": peers.file_delay(here, other, f"file.{task}.0"),
        "back_s": peers.file_delay(other, here, f"file.{task}.1"),
    }
    if not all(delay.same_content for delay in delays.values()):
        return failed(
            "directory between hosts",
            f"host {name}: one host does not read what the other one wrote",
            "the hosts share no directory, or its client caches wrongly: choose another root",
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
    """Let the others end once all of them have connected to each other."""
    for word in ("wait", "bye"):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(_tell, host, word), others.values()))
    atomic.replace(host.folder / "bye", b"")


def _tell(host: ProbeHost, word: str, address: str) -> None:
    try:
        ask(address, host.token, word)
    except OSError:
        return  # an unreachable host has been reported, and its own wait is bounded


def _wait_for_bye(host: ProbeHost, server: peers.Server) -> None:
    """Serve the first host until it says bye, over the network or in the directory."""
    deadline = time.monotonic() + 2 * LONGEST_DELAY_S + BYE_S
    while time.monotonic() < deadline and not server.said_bye.wait(0.2):
        if (host.folder / "bye").exists():
            return


def _address(host: ProbeHost, task: int) -> Path:
    return host.folder / f"address.{task}"


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
