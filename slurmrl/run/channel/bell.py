"""Doorbells: datagrams that say that the sender's log has grown, and the addresses they use.

They are only a hint, sent once and never answered: the files are the truth, and logs are polled
whether or not anything rings. A ring consists of the secret token of the bell that is rung. Which
log has grown follows from the address that it comes from. The master, the agents and the rollout
tasks each have a bell at their host's address on the network between the hosts.
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
RINGS_AT_ONCE = 4096
"""Most datagrams that are received before the caller looks at other things."""
RECEIVE_BUFFER_BYTES = 1 << 20
"""Requested for rings that arrive while logs are read; the kernel may grant less."""
LOOK_S = 0.02
"""Shortest interval in which rings have their hearer look at files, however many there are."""
SEND_S = 0.01
"""Longest wait per round of rings for room in the kernel's buffer."""
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("9I")
_DROPS = 8
"""Index in `_MEMINFO` of the datagrams that found the buffer full."""


def _is_address(value: object) -> bool:
    """Whether it is an address already: a name would be looked up, which can block."""
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
class BellAddress:
    """Address and token for a wake-up; secret, because of the token."""

    host: Annotated[str, ADDRESS]
    port: Annotated[int, PORT]
    token: Annotated[str, TOKEN]

    @property
    def source(self) -> Source:
        """Where the rings of this bell's owner come from."""
        return self.host, self.port


@dataclass(frozen=True)
class Rings:
    """Return the wake-ups received since the last call."""

    sources: frozenset[Source]
    """Where rings with the right token came from."""
    overflowed: bool
    """Whether the kernel dropped datagrams, which may have been rings."""


class Bell:
    """A bell on a free port of ``address``. Raises OSError."""

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
    def address(self) -> BellAddress:
        host, port = self._socket.getsockname()
        return BellAddress(host, port, self._token.hex())

    def fileno(self) -> int:
        """Readable when `hear` has something to do."""
        return self._socket.fileno()

    def hear(self) -> Rings:
        """Receive the rings that have arrived, without waiting. Anything else is dropped."""
        sources = set()
        for _ in range(RINGS_AT_ONCE):
            try:
                token, source = self._socket.recvfrom(TOKEN_BYTES + 1)
            except OSError:  # none is left, or the network is down
                break
            if hmac.compare_digest(token, self._token):
                sources.add(source)
        drops, self._drops = self._drops, self._count_drops()
        return Rings(frozenset(sources), overflowed=self._drops != drops)

    def ring(self, others: Iterable[BellAddress]) -> None:
        """Ring other bells. A ring that cannot be sent is lost."""
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

    def _send(self, other: BellAddress) -> None:
        self._socket.sendto(bytes.fromhex(other.token), other.source)

    def _count_drops(self) -> int:
        try:
            known = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        except OSError:  # an old kernel does not count them
            return 0
        return int(_MEMINFO.unpack(known)[_DROPS]) if len(known) == _MEMINFO.size else 0


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
        logger.warning("no wake-ups, so messages are found only by polling: %s", error)
        return None
