"""Encoding of name store entries as JSON: ``{"value": …, "nonce": …, "owner": …}``."""

from __future__ import annotations

import json

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import documents
from slurmrl.name_resolve.base import NameEntry


def pack(entry: NameEntry) -> bytes:
    return json.dumps(entry._asdict()).encode()


def unpack(data: bytes, where: object) -> NameEntry:
    """Decode an entry. Raises CorruptFileError that names ``where``."""
    try:
        content = documents.parse(data, "it")
    except CorruptFileError as error:
        raise CorruptFileError(f"{where} is not an entry of a name store: {error}") from error
    value, nonce = content.get("value"), content.get("nonce")
    owner = content.get("owner", "")
    if not (isinstance(value, str) and isinstance(nonce, str) and isinstance(owner, str)):
        raise CorruptFileError(f"{where} is not an entry of a name store: not all strings")
    if not nonce.isalnum() or (owner and not _is_file_name(owner)):
        raise CorruptFileError(f"{where} is not an entry of a name store: bad nonce or owner")
    return NameEntry(value, nonce, owner)


def _is_file_name(text: str) -> bool:
    return text.isprintable() and "/" not in text and not text.startswith(".")
