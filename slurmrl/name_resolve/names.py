"""Keys of name stores: normal form, limits and file names."""

from __future__ import annotations

import posixpath
from functools import lru_cache
from urllib.parse import quote, unquote

from slurmrl.errors import InvalidNameError
from slurmrl.fsio.shapes import FILE_NAME_BYTES

VALUE_BYTES = 1 << 20
"""Limit on a value in UTF-8: a name store holds addresses and short notes, not data."""


def normalise(name: str) -> str:
    """Return the normal form of a key: ``a/``, ``./a`` and ``/a`` are ``a``, ``a//b`` is ``a/b``.

    Raises InvalidNameError.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a key is a string, not {name!r}")
    key = posixpath.normpath(name.strip("/")) if name.strip("/") else "."
    if key == ".":
        raise InvalidNameError(f"empty key {name[:80]!r}")
    if ".." in name.split("/"):
        raise InvalidNameError(f"key {name[:80]!r}: '..' is not allowed")
    if not name.isprintable():
        raise InvalidNameError(f"key {name[:80]!r}: unprintable characters are not allowed")
    encode(key)
    return key


def normalise_root(root: str) -> str:
    """Like `normalise`, and the empty string (all keys) for ``""``, ``"/"`` and ``"."``."""
    return "" if isinstance(root, str) and root.strip("/") in ("", ".") else normalise(root)


def below(key: str, root: str) -> bool:
    """Return whether a key is ``root`` itself or below ``root/``."""
    return not root or key == root or key.startswith(f"{root}/")


@lru_cache(maxsize=4096)
def encode(key: str) -> str:
    """Return the file name of a key (one to one). Raises InvalidNameError if it is too long."""
    name = quote(key, safe="/").replace("/", "+")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > FILE_NAME_BYTES:
        raise InvalidNameError(
            f"key {key[:80]!r}… takes {len(name)} bytes encoded, at most {FILE_NAME_BYTES} fit"
        )
    return name


def decode(file_name: str) -> str | None:
    """Return the key of a file name; None for a file that no store created."""
    key = unquote(file_name.replace("+", "/"))
    try:
        return key if encode(normalise(key)) == file_name else None
    except InvalidNameError:
        return None


def checked_value(key: str, value: object) -> str:
    """Return a value as a string. Raises InvalidNameError if it is too long or not Unicode."""
    text = str(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"value of {key!r}: {error}") from error
    if size > VALUE_BYTES:
        raise InvalidNameError(f"value of {key!r} has {size} bytes, at most {VALUE_BYTES} fit")
    return text
