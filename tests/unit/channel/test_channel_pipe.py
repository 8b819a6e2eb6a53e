from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.run.channel.message_log import encode
from slurmrl.run.channel.pipe import Connection

Pair = tuple[Connection, Connection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = Connection.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_once_and_in_order(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.receive_available() == []
    ours.send({"n": 0})
    ours.send({"n": 1})
    ours.send({"n": 2})
    assert theirs.receive(timeout_s=60) == {"n": 0}
    assert theirs.receive_available() == [{"n": 1}, {"n": 2}]
    theirs.send({"back": True})
    assert ours.receive(timeout_s=None) == {"back": True}
    assert not ours.closed


def test_end_of_pipe_comes_after_the_last_message(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send({"never": "read"})
    ours.send({"n": 0})
    ours.send({"n": 1})
    ours.close()
    assert ours.closed
    assert not theirs.closed
    assert theirs.receive(timeout_s=60) == {"n": 0}
    assert not theirs.closed
    assert theirs.receive(timeout_s=60) == {"n": 1}
    assert theirs.receive(timeout_s=None) is None
    assert theirs.closed
    theirs.send({"to": "nobody"})
    assert theirs.receive_available() == []


def test_incomplete_last_message_is_dropped() -> None:
    raw, end = socket.socketpair()
    connection = Connection(end)
    raw.sendall(encode({"n": 0}) + encode({"n": 1})[:-1])
    raw.close()
    assert connection.receive_available() == [{"n": 0}]
    assert connection.closed
    connection.close()


def test_garbage_on_the_pipe_is_an_error() -> None:
    raw, end = socket.socketpair()
    connection = Connection(end)
    raw.sendall(b"printed by accident\n")
    with pytest.raises(CorruptFileError):
        connection.receive_available()
    connection.close()
    raw.close()


def test_sending_never_blocks_and_queued_messages_are_sent(pair: Pair) -> None:
    ours, theirs = pair
    sent = [{"n": number, "long": "x" * 100_000} for number in range(20)]
    for message in sent:
        ours.send(message)
    assert not ours.flush()
    received = []
    while len(received) < len(sent):
        received += theirs.receive_available()
        ours.flush()
    assert received == sent
    assert ours.flush()


def test_waiting_for_messages_sends_queued_messages(pair: Pair) -> None:
    ours, theirs = pair
    ours.send({"long": "x" * 2_000_000})
    received = []

    def answer() -> None:
        received.append(theirs.receive(timeout_s=60))
        theirs.send({"done": True})

    thread = threading.Thread(target=answer)
    thread.start()
    assert ours.receive(timeout_s=60) == {"done": True}
    thread.join()
    assert len(received[0]["long"]) == 2_000_000


def test_closed_peer_ends_a_pipe_with_queued_messages(pair: Pair) -> None:
    ours, theirs = pair
    ours.send({"long": "x" * 2_000_000})
    theirs.close()
    assert ours.receive(timeout_s=60) is None
    assert ours.closed
    assert ours.flush()


def test_descriptors_are_passed_in_order(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.take_fd() is None
    pipes = [os.pipe() for _ in range(2)]
    ours.send({"n": 0})
    for number, (read_end, write_end) in enumerate(pipes):
        ours.send_with_fds({"n": number + 1}, write_end)
        os.close(write_end)
        ours.send({"between": number, "read_end": read_end})
    assert [message.get("n") for message in theirs.receive_available()] == [0, 1, None, 2, None]
    for number, (read_end, _) in enumerate(pipes):
        taken = theirs.take_fd()
        assert taken is not None
        assert not os.get_inheritable(taken)
        os.write(taken, str(number).encode())
        os.close(taken)
        assert os.read(read_end, 10) == str(number).encode()
        assert os.read(read_end, 10) == b""
        os.close(read_end)
    assert theirs.take_fd() is None


def test_descriptor_is_sent_after_queued_messages(pair: Pair) -> None:
    ours, theirs = pair
    read_end, write_end = os.pipe()
    ours.send({"long": "x" * 2_000_000})
    ours.send_with_fds({"with": "fd"}, write_end)
    os.close(write_end)
    received = []
    while len(received) < 2:
        received += theirs.receive_available()
        ours.flush()
    taken = theirs.take_fd()
    assert taken is not None
    os.close(taken)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_unclaimed_descriptors_are_closed(pair: Pair) -> None:
    ours, theirs = pair
    read_end, write_end = os.pipe()
    ours.send_with_fds({}, write_end)
    os.close(write_end)
    theirs.receive_available()
    theirs.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)
