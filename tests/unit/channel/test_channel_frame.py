from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import CorruptFileError, UsageError
from slurmrl.run.channel import message_log
from slurmrl.run.channel.message_log import decode, encode

VALUES = st.none() | st.integers() | st.text(max_size=10) | st.lists(st.booleans(), max_size=3)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4)
UNTIMED = settings(deadline=None, max_examples=100)


def framed(body: bytes) -> bytes:
    """Return a frame made by hand, according to the format."""
    length = struct.pack("<I", len(body))
    return b"SRL1" + length + struct.pack("<I", zlib.crc32(length + body)) + body


def test_frame_has_the_documented_format() -> None:
    assert encode({"a": 1}) == framed(b'{"a":1}')


@UNTIMED
@given(MESSAGES, st.integers(0, 500))
def test_any_prefix_yields_its_whole_messages(messages: list[dict[str, Any]], cut: int) -> None:
    frames = [encode(message) for message in messages]
    data = b"".join(frames)[:cut]
    for torn in (True, False):
        found, taken = decode(data, torn=torn)
        assert found == messages[: len(found)]
        assert taken == sum(len(one) for one in frames[: len(found)])
        rest = frames[len(found)] if len(found) < len(frames) else b""
        assert len(data) - taken < max(len(rest), 1)


@UNTIMED
@given(MESSAGES, st.binary(min_size=1))
def test_garbage_after_messages_is_treated_as_unwritten(
    messages: list[dict[str, Any]], garbage: bytes
) -> None:
    whole = b"".join(map(encode, messages))
    found, taken = decode(whole + b"\x00" + garbage)
    assert (found, taken) == (messages, len(whole))


@pytest.mark.parametrize("flipped", range(len(framed(b'{"a":1}'))))
def test_changed_byte_is_detected(flipped: int) -> None:
    data = bytearray(encode({"a": 1}))
    data[flipped] ^= 0x10
    assert decode(data) == ([], 0)


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 12,
        b"SRL1" + struct.pack("<II", message_log.MESSAGE_BYTES + 1, 0),
        encode({})[:-1] + b"x",
        b"\x00" * 100,
    ],
)
def test_garbage_on_a_pipe_is_an_error(data: bytes) -> None:
    assert decode(data) == ([], 0)
    with pytest.raises(CorruptFileError, match="does not begin a valid frame"):
        decode(data, torn=False)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 10**5])
@pytest.mark.parametrize("torn", [True, False])
def test_complete_frames_with_wrong_content_are_errors(body: bytes, torn: bool) -> None:
    with pytest.raises(CorruptFileError, match="a frame does not hold"):
        decode(framed(body), torn=torn)


def test_too_long_messages_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_log, "MESSAGE_BYTES", 100)
    with pytest.raises(UsageError, match="too long: limit 100"):
        encode({"a": "x" * 100})
    assert json.loads(encode({"a": "x" * 80})[12:]) == {"a": "x" * 80}
