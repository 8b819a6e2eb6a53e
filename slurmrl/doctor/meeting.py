"""How the hosts of the short job see each other: over the network, and through the directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl.doctor import peers
from slurmrl.doctor.check import Check, failed, ok, warning
from slurmrl.doctor.directory import seconds
from slurmrl.doctor.peers import LONGEST_DELAY_S, ask
from slurmrl.fsio import atomic
from slurmrl.workers.agent.address import fabric_address, interface_of

MEET_S = 15.0
"""How long hosts wait for each other's addresses."""
BYE_S = 5.0
SLOW_DELAY_S = 2.0
AT_ONCE = 16
MOST_PEERS = 64
"""With more hosts, each one connects to the next ones in a ring."""
NETWORK_ADVICE = (
    "set cluster.interface to an interface that all hosts reach each other by (see 'interface'), "
    "or ask for the firewall between compute nodes to be opened"
)
DELAY_ADVICE = (
    "the directory's clients remember that a file was missing: runs work but notice things late; "
    "mount it with lookupcache=positive or a small acdirmin/acdirmax"
)


@dataclass(frozen=True)
class Place:
    """This host among those of the job."""

    folder: Path
    token: str
    task: int
    hosts: int
    interface: str | None


def check(place: Place) -> list[Check]:
    """Meet the other hosts; only the first one measures between pairs of hosts."""
    own = fabric_address(place.interface, place.hosts)
    found = [ok("interface", f"{interface_of(own)} at {own}; there are: {_interfaces()}")]
    if place.hosts == 1:
        return found
    server = peers.Server(place.folder, place.token, own)
    try:
        atomic.replace(_address(place, place.task), f"{own}:{server.port}".encode())
        known, waited_s = _wait_for_addresses(place)
        found.append(_met(place, known, waited_s))
        found.append(_connections(place, known))
        server.has_connected.set()
        others = {task: address for task, address in known.items() if task != place.task}
        if place.task == 0:
            found += _pairs(place, others)
            _part(place, others)
        else:
            _wait_for_bye(place, server)
    finally:
        server.close()
    return found


def _wait_for_addresses(place: Place) -> tuple[dict[int, str], float]:
    known: dict[int, str] = {}
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < MEET_S and len(known) < place.hosts:
        for task in set(range(place.hosts)) - set(known):
            try:
                known[task] = atomic.read(_address(place, task)).decode()
            except FileNotFoundError:
                continue
        if len(known) < place.hosts:
            time.sleep(0.05)
    return known, waited_s


def _met(place: Place, known: Mapping[int, str], waited_s: float) -> Check:
    missing = sorted(set(range(place.hosts)) - set(known))
    if missing:
        names = ", ".join(map(str, missing))
        measured = f"no file of host {names} of {place.hosts} was seen in {MEET_S:.0f} s"
        advice = "every host must mount the same directory at the same path; look at the job's log"
        return failed("hosts meet", measured, advice)
    measured = f"{place.hosts} hosts found each other in {seconds(waited_s)}"
    return ok("hosts meet", measured, waited_s=waited_s)


def _connections(place: Place, known: Mapping[int, str]) -> Check:
    ring = [(place.task + step) % place.hosts for step in range(1, place.hosts)]
    others = [task for task in ring if task in known][:MOST_PEERS]
    problems = []
    for task in others:
        try:
            ask(known[task], place.token, "time")
        except OSError as error:
            problems.append(f"{known[task]}: {error.strerror or error}")
    if problems:
        return failed("connections", "cannot reach " + "; ".join(problems), NETWORK_ADVICE)
    return ok("connections", f"reaches the {len(others)} other host{'s' * (len(others) > 1)}")


def _pairs(place: Place, others: Mapping[int, str]) -> list[Check]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = pool.map(lambda item: _pair(place, *item), others.items())
        return [check for found in results for check in found]


def _pair(place: Place, task: int, address: str) -> list[Check]:
    host = address.rpartition(":")[0]
    name = f"0 and {task} ({host})"
    try:
        offset_s, within_s = peers.clock_offset(address, place.token)
        clock = ok(
            "clock difference",
            f"host {name}: {offset_s * 1e3:+.1f} ms within {within_s * 1e3:.1f} ms",
            offset_s=offset_s,
            within_s=within_s,
        )
        return [clock, _delays(place, task, address, name)]
    except OSError as error:
        return [failed("directory between hosts", f"host {name}: {error}", NETWORK_ADVICE)]


def _delays(place: Place, task: int, address: str, name: str) -> Check:
    """Delay until each of two hosts sees a new file that it has looked for before, by its own
    clock from the moment when the other one says that it is there."""
    there, back = f"file.{task}.0", f"file.{task}.1"
    ask(address, place.token, "miss", there)
    made = peers.act(place.folder, "make", there)
    seen = ask(address, place.token, "see", there)
    peers.act(place.folder, "miss", back)
    made_back = ask(address, place.token, "make", back)
    seen_back = peers.act(place.folder, "see", back)
    values = {"there_s": seen["delay_s"], "back_s": seen_back["delay_s"]}
    shown = " and ".join(_shown(value) for value in values.values())
    measured = f"host {name}: a new file is seen after {shown}"
    numbers = {key: value for key, value in values.items() if value is not None}
    for one, other in ((made, seen), (made_back, seen_back)):
        if other["delay_s"] is not None and one["digest"] != other["digest"]:
            return failed(
                "directory between hosts",
                f"host {name}: the other host reads something else than was written",
                "the hosts share no directory, or its client caches wrongly: choose another root",
            )
    if len(numbers) < 2:
        return failed("directory between hosts", measured, DELAY_ADVICE, **numbers)
    if max(numbers.values()) > SLOW_DELAY_S:
        return warning("directory between hosts", measured, DELAY_ADVICE, **numbers)
    return ok("directory between hosts", measured, **numbers)


def _shown(value: Any) -> str:
    return f"more than {LONGEST_DELAY_S:.0f} s" if value is None else seconds(value)


def _part(place: Place, others: Mapping[int, str]) -> None:
    """Let the others go, once all of them have connected to each other."""
    for word in ("wait", "bye"):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(_tell, place, word), others.values()))
    atomic.replace(place.folder / "bye", b"")


def _tell(place: Place, word: str, address: str) -> None:
    try:
        ask(address, place.token, word)
    except OSError:
        return  # one that cannot be reached was told already, and it does not wait for ever


def _wait_for_bye(place: Place, server: peers.Server) -> None:
    """Serve the first host until it is done: it says so over the network and in the directory."""
    deadline = time.monotonic() + 2 * LONGEST_DELAY_S + BYE_S
    while time.monotonic() < deadline and not server.said_bye.wait(0.2):
        if (place.folder / "bye").exists():
            return


def _address(place: Place, task: int) -> Path:
    return place.folder / f"address.{task}"


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
