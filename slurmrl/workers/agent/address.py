"""The address at which this host's ranks are reached by the others."""

from __future__ import annotations

import fcntl
import socket
import struct

from slurmrl.errors import EnvironmentFailure

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ROUTE_PROBE = ("192.0.2.1", 9)
"""An address of a documentation network (RFC 5737): connecting a UDP socket to it sends nothing
and tells which of our addresses the default route uses."""


def interface_address(interface: str) -> str | None:
    """IPv4 address of a network interface, or None when it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """Name of the interface that has this IPv4 address."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if interface_address(name) == address), None)


def default_address() -> str | None:
    """Our address on the default route, or None when there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ROUTE_PROBE)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def fabric_address(interface: str | None, hosts: int) -> str:
    """The address to bind: the configured interface's, else loopback for a job of one host, else
    that of the default route. Several hosts never get loopback silently.

    Raises:
        EnvironmentFailure: the interface has no address, or none can be found.
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
            f"no address for {hosts} hosts to meet at; set cluster.interface to one of: {known}"
        )
    return address


def listen(address: str) -> socket.socket:
    """A listening TCP socket on a free port of ``address``."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(4096)
    return listener
