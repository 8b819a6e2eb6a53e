"""Wake-ups, which are datagrams about growth of the sender's log, and addresses of their sockets.

A wake-up is only a hint, sent once and never answered. Readers also poll the logs, which contain
all messages. A wake-up contains the receiver's secret token. The sender's address shows which log
has grown. The master, the agents and the rollout tasks each have a socket at their host's address
on the network between the hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import select
import socket
import string
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import is_local
from slurmrl.fsio.documents import FieldType

Source: TypeAlias = tuple[str, int]
"""Address and port."""

TOKEN_BYTES = 16
WAKEUPS_AT_ONCE = 4096
"""Maximum number of datagrams received in one call, so that the caller can do other work."""
RECEIVE_BUFFER_BYTES = 1 << 20
"""Requested size of the buffer for wake-ups that arrive while logs are read. The kernel may grant
less."""
LOOK_S = 0.02
"""Minimum number of seconds between two file reads that wake-ups cause."""
SEND_S = 0.01
"""Maximum number of seconds that a call of `wake` waits for room in the kernel's buffer."""
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("9I")
_DROPS = 8
"""Index in `_MEMINFO` of the number of datagrams dropped because the buffer was full."""


def _is_address(value: object) -> bool:
    """Return whether the value is an IPv4 address. A host name would need a slow lookup."""
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


def _is_token(value: object) -> bool:
    digits = set(string.hexdigits)
    return isinstance(value, str) and len(value) == 2 * TOKEN_BYTES and set(value) <= digits


ADDRESS = FieldType("an IPv4 address", _is_address)
PORT = FieldType("a port", lambda value: type(value) is int and 0 < value < 1 << 16)
TOKEN = FieldType(f"{2 * TOKEN_BYTES} hexadecimal digits", _is_token)


@dataclass(frozen=True)
class WakeupAddress:
    """Address and token of a socket. Keep the token secret, because it allows sending wake-ups."""

    host: Annotated[str, ADDRESS]
    port: Annotated[int, PORT]
    token: Annotated[str, TOKEN]

    @property
    def source(self) -> Source:
        """The address from which the owner of the socket sends its wake-ups."""
        return self.host, self.port


@dataclass(frozen=True)
class Wakeups:
    """The wake-ups since the last call of `receive`."""

    sources: frozenset[Source]
    """The addresses that sent wake-ups with the right token."""
    overflowed: bool
    """Whether the kernel dropped datagrams, some of which may have been wake-ups."""


class WakeupSocket:
    """A socket for wake-ups on a free port of ``address``. Raises OSError."""

    def __init__(self, address: str) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._drops = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            self._socket.bind((address, 0))
        except OSError:
            self._socket.close()
            raise

    @property
    def address(self) -> WakeupAddress:
        host, port = self._socket.getsockname()
        return WakeupAddress(host, port, self._token.hex())

    def fileno(self) -> int:
        """Return a descriptor that is readable when datagrams have arrived for `receive`."""
        return self._socket.fileno()

    def receive(self) -> Wakeups:
        """Return the wake-ups that have arrived, without waiting. Drop other datagrams."""
        sources = set()
        for _ in range(WAKEUPS_AT_ONCE):
            try:
                token, source = self._socket.recvfrom(TOKEN_BYTES + 1)
            except OSError:  # no datagram is left, or the network is down
                break
            if hmac.compare_digest(token, self._token):
                sources.add(source)
        drops, self._drops = self._drops, self._count_drops()
        return Wakeups(frozenset(sources), overflowed=self._drops != drops)

    def wake(self, others: Iterable[WakeupAddress]) -> None:
        """Send a wake-up to each address. A wake-up that cannot be sent is lost."""
        patience_s = SEND_S
        for other in others:
            with contextlib.suppress(OSError):
                try:
                    self._send(other)
                except BlockingIOError:
                    select.select([], [self._socket], [], patience_s)
                    patience_s = 0.0
                    self._send(other)

    def close(self) -> None:
        self._socket.close()

    def _send(self, other: WakeupAddress) -> None:
        self._socket.sendto(bytes.fromhex(other.token), other.source)

    def _count_drops(self) -> int:
        try:
            known = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        except OSError:  # an old kernel does not count drops
            return 0
        return int(_MEMINFO.unpack(known)[_DROPS]) if len(known) == _MEMINFO.size else 0


LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_ROUTE_PROBE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737). Connecting a UDP socket to this address sends
nothing, and shows which address of this host the default route uses."""

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
    """Return this host's address on the default route; None if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ROUTE_PROBE)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def fabric_address(interface: str | None, hosts: int) -> str:
    """Return the address for this host's sockets.

    Use the first of these addresses that applies:

    - the address of the configured interface
    - loopback, for a job of one host
    - the address of the default route

    Raises:
        EnvironmentFailure: The interface has no address, or the default route has no address other
            than loopback.
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


def open_wakeups(control: Path, interface: str | None, hosts: int) -> WakeupSocket | None:
    """Return a socket on this host's fabric address for wake-ups about the logs in ``control``.

    Return None if the kernel reports changes of these logs. Also return None if wake-ups are
    impossible; the logs are then only polled.
    """
    return None if is_local(control) else fabric_wakeups(interface, hosts)


def fabric_wakeups(interface: str | None, hosts: int) -> WakeupSocket | None:
    """Return a socket on this host's fabric address; None if wake-ups are impossible."""
    try:
        return WakeupSocket(fabric_address(interface, hosts))
    except (EnvironmentFailure, OSError) as error:
        logger.warning("no wake-ups, so messages are found only by polling: %s", error)
        return None
