"""Frames: magic, length and checksum, then a JSON object.

0      4        8       12
| SRL1 | length | crc32 | JSON ...          integers little-endian, crc32 over length and JSON
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from slurmrl.errors import CorruptFileError, UsageError

MAGIC = b"SRL1"
HEAD = struct.Struct("<4sII")
LENGTH = struct.Struct("<I")
MESSAGE_BYTES = 64 << 20
"""Longest message; a frame that claims more is damaged."""

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Raises UsageError for a message that is too long."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MESSAGE_BYTES:
        raise UsageError(f"a message of {len(body)} bytes is too long: limit {MESSAGE_BYTES}")
    return HEAD.pack(MAGIC, len(body), _checksum(body)) + body


def decode(buffer: bytes | bytearray, *, torn: bool = True) -> tuple[list[Message], int]:
    """Return the complete messages at the start of ``buffer`` and the number of bytes they take.

    The rest is incomplete. With ``torn`` it may include bytes that are not a frame, because a file
    can show half a write; otherwise such bytes raise CorruptFileError. So does a frame with a
    correct checksum whose content is not a JSON object.
    """
    messages: list[Message] = []
    start = 0
    while len(buffer) - start >= HEAD.size:
        magic, length, checksum = HEAD.unpack_from(buffer, start)
        plausible = magic == MAGIC and length <= MESSAGE_BYTES
        stop = start + HEAD.size + length
        if plausible and len(buffer) < stop:
            break
        body = bytes(buffer[start + HEAD.size : stop]) if plausible else b""
        if not plausible or _checksum(body) != checksum:
            if torn:
                break
            raise CorruptFileError(f"not a frame: {bytes(buffer[start : start + HEAD.size])!r}")
        messages.append(_parse(body))
        start = stop
    return messages, start


def _checksum(body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(LENGTH.pack(len(body))))


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"a frame does not hold JSON: {error!r}") from error
    if not isinstance(message, dict):
        raise CorruptFileError(f"a frame does not hold a JSON object: {body[:80]!r}")
    return message
