"""The network address at which other hosts reach the ranks of this one."""

from __future__ import annotations

import fcntl
import socket
import struct

from slurmrl.errors import EnvironmentFailure

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ROUTE_PROBE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737): connecting a UDP socket to it sends nothing and
shows which of our addresses the default route uses."""


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
    """Return the address to bind: that of the configured interface, else loopback for a job of one
    host, else that of the default route. A job of several hosts never gets loopback.

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
