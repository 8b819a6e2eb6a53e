"""A pipe of messages between a process and its child, over one end of a socket pair.

Only `Connection.receive` waits. Data that does not fit into the kernel's buffer is queued and sent
by later calls. Several threads may send, but only a single thread may receive.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from slurmrl.run.channel.message_log import Message, decode, encode

CHUNK_BYTES = 1 << 16
FDS_PER_MESSAGE = 2
"""Maximum number of descriptors in one message."""


@dataclass
class Outgoing:
    """Queued bytes, and the descriptors that are sent with the first byte."""

    data: memoryview
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class Connection:
    """One end of a socket pair.

    The object owns the socket. If the peer closes its end, methods do not raise; `closed` becomes
    true after its last message. Bytes that are not frames raise CorruptFileError.
    """

    def __init__(self, end: socket.socket | int) -> None:
        self._socket = socket.socket(fileno=end) if isinstance(end, int) else end
        self._socket.setblocking(False)
        self._buffer = bytearray()
        self._inbox: deque[Message] = deque()
        self._outbox: deque[Outgoing] = deque()
        self._descriptors: deque[int] = deque()
        self._eof = False
        self._deaf = False
        """Whether the peer no longer reads."""
        self._sending = threading.Lock()

    @classmethod
    def from_fd(cls, descriptor: int) -> Connection:
        """Wrap a descriptor from the parent. Children of this process do not inherit it."""
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    @classmethod
    def pair(cls) -> tuple[Connection, Connection]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """Return a descriptor that is readable when messages may have arrived; -1 after `close`."""
        return self._socket.fileno()

    @property
    def closed(self) -> bool:
        """Whether the peer has closed and all its messages were received, or `close` was called."""
        return self.fileno() < 0 or (self._eof and not self._inbox)

    # -- sending -----------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send a message. Queue bytes that do not fit. Drop all bytes if the peer has closed."""
        self._queue(Outgoing(memoryview(encode(message))))

    def send_with_fds(self, message: Message, *descriptors: int) -> None:
        """Send a message and copies of open descriptors, for the peer's `take_fd`."""
        self._queue(Outgoing(memoryview(encode(message)), [*map(os.dup, descriptors)]))

    def flush(self) -> bool:
        """Send as much of the queue as fits. Return whether the queue is empty."""
        with self._sending:
            return self._flush()

    def _queue(self, outgoing: Outgoing) -> None:
        with self._sending:
            self._outbox.append(outgoing)
            self._flush()

    def _flush(self) -> bool:
        while self._outbox and not self._deaf and self.fileno() >= 0:
            first = self._outbox[0]
            try:
                sent = self._send_some(first)
            except (BlockingIOError, InterruptedError):
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._deaf = True
                break
            first.close()
            first.data = first.data[sent:]
            if not first.data:
                self._outbox.popleft()
        if self._outbox:
            self._drop_outbox()
        return True

    def _send_some(self, first: Outgoing) -> int:
        if not first.descriptors:
            return self._socket.send(first.data)
        return socket.send_fds(self._socket, [first.data], first.descriptors)

    def _drop_outbox(self) -> None:
        while self._outbox:
            self._outbox.popleft().close()

    # -- receiving ---------------------------------------------------------------------------

    def receive_available(self) -> list[Message]:
        """Return all received messages without waiting."""
        self.flush()
        self._fill()
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def receive(self, timeout_s: float | None) -> Message | None:
        """Return the next message; None on timeout or if the peer has closed (see `closed`).

        ``timeout_s`` None waits without a limit.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.flush()
            if not self._inbox:
                self._fill()
            if self._inbox:
                return self._inbox.popleft()
            left_s = None if deadline is None else deadline - time.monotonic()
            if self.closed or (left_s is not None and left_s <= 0):
                return None
            self._wait(left_s)

    def take_fd(self) -> int | None:
        """Return the oldest received descriptor that was not taken yet; None if there is none.

        The caller then owns the descriptor.
        """
        return self._descriptors.popleft() if self._descriptors else None

    def close(self) -> None:
        """Close this end. The peer then sees the end of the messages."""
        with self._sending:
            self._drop_outbox()
            self._socket.close()
        while (descriptor := self.take_fd()) is not None:
            os.close(descriptor)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until the socket is readable, or writable if data is queued."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        poller.poll(None if timeout_s is None else max(timeout_s, 0.0) * 1000)

    def _fill(self) -> None:
        """Receive the bytes that the kernel has buffered for this end."""
        while self.fileno() >= 0 and not self._eof:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, CHUNK_BYTES, FDS_PER_MESSAGE
                )
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:
                data, descriptors = b"", []
            for descriptor in descriptors:  # Python 3.11 drops flags such as MSG_CMSG_CLOEXEC
                os.set_inheritable(descriptor, False)
                self._descriptors.append(descriptor)
            self._buffer += data
            self._eof = not data
        messages, taken = decode(self._buffer, torn=False)
        del self._buffer[:taken]
        self._inbox.extend(messages)
