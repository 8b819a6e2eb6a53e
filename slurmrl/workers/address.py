"""The address of this host on the network between the hosts, and the bells at that address.

The master, the agents and the rollout tasks each have such a bell for wake-ups (see
`run.channel.bell`).
"""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import is_local
from slurmrl.run.channel.bell import Bell

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ROUTE_PROBE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737): connecting a UDP socket to it sends nothing and
shows which of our addresses the default route uses."""

logger = log.get(__name__)


def interface_address(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, or None if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if interface_address(name) == address), None)


def default_address() -> str | None:
    """Return our address on the default route, or None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ROUTE_PROBE)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def fabric_address(interface: str | None, hosts: int) -> str:
    """Return the address to bind; a job of several hosts never gets loopback.

    The first of these that applies is used:

    - the address of the configured interface
    - loopback, for a job of one host
    - the address of the default route

    Raises:
        EnvironmentFailure: the interface has no address, or no address was found.
    """
    known = ", ".join(name for _, name in socket.if_nameindex())
    if interface is not None:
        address = interface_address(interface)
        if address is None:
            raise EnvironmentFailure(
                f"cluster.interface: '{interface}' has no IPv4 address here; interfaces: {known}"
            )
        return address
    if hosts == 1:
        return LOOPBACK
    address = default_address()
    if address is None or address.startswith("127."):
        raise EnvironmentFailure(
            f"no address at which {hosts} hosts can reach each other; set cluster.interface to one "
            f"of: {known}"
        )
    return address


def install_bell(control: Path, interface: str | None, hosts: int) -> Bell | None:
    """Return a bell on this host's fabric address for the logs in ``control``.

    None where the kernel reports their changes, and where no bell is possible: then they are only
    polled.
    """
    return None if is_local(control) else fabric_bell(interface, hosts)


def fabric_bell(interface: str | None, hosts: int) -> Bell | None:
    """Return a bell on this host's fabric address; None where none is possible."""
    try:
        return Bell(fabric_address(interface, hosts))
    except (EnvironmentFailure, OSError) as error:
        logger.warning("no doorbell, messages are noticed by polling only: %s", error)
        return None
