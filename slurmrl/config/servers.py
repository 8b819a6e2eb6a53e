"""Servers that run already: their addresses, and the keys that they require."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from slurmrl import env
from slurmrl.errors import UsageError
from slurmrl.fsio import inputs

ADDRESSES = "http://HOST:PORT, https://HOST:PORT or unix:/PATH"
MOST_KEYS = 2
MOST_KEY_BYTES = 4096
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Address:
    """Where a server listens: ``http://host:port``, ``https://host:port`` or ``unix:/path``."""

    text: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.text)
            port = parts.port
        except ValueError as error:
            message = f"server address '{self.text}': {error}; allowed: {ADDRESSES}"
            raise UsageError(message) from error
        if parts.scheme == "unix":
            valid = parts.path.startswith("/") and not parts.netloc
        else:
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and port is not None
            valid = valid and parts.path in ("", "/") and "@" not in parts.netloc
        if not valid or parts.query or parts.fragment:
            raise UsageError(f"server address '{self.text}' is not valid; allowed: {ADDRESSES}")

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket; None for TCP."""
        scheme, _, path = self.text.partition(":")
        return path if scheme == "unix" else None

    def url(self, path: str) -> str:
        """The URL of ``/path``. A Unix socket needs a host name as well, which means nothing."""
        return (self.text.rstrip("/") if self.socket is None else "http://localhost") + path


@dataclass(frozen=True, kw_only=True)
class ServerKeys:
    """What requests carry as ``Authorization: Bearer KEY``; empty: no such header."""

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)
    """For routes that change the server, where it has a key of its own for them."""


def read_keys(path: Path | None, environ: Mapping[str, str] = os.environ) -> ServerKeys:
    """Return the keys in the lines of a file that only the user can read.

    The lines are the API key, then the admin key, if there is one. Without a file, return the keys
    of the environment.

    Raises UsageError, and UnreadableInputError for a file that is missing or cannot be read.
    """
    if path is None:
        api, admin = (
            _checked(variable.get(environ), variable.name)
            for variable in (env.SERVER_KEY, env.SERVER_ADMIN_KEY)
        )
        return ServerKeys(api=api, admin=admin or api)
    try:
        status = path.stat()
    except OSError as error:
        raise inputs.unreadable(error, path) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_KEY_BYTES:
        raise UsageError(f"{path} is not a file with a key of at most {MOST_KEY_BYTES} bytes")
    if status.st_uid != os.geteuid() or status.st_mode & OTHERS:
        raise UsageError(
            f"other users may read the key in {path} (mode {stat.S_IMODE(status.st_mode):04o}, "
            f"user {status.st_uid}): make it yours, with mode 0600"
        )
    lines = inputs.read(path).decode("ascii", errors="replace").splitlines()
    keys = [_checked(line.strip(), str(path)) for line in lines if line.strip()]
    if not 1 <= len(keys) <= MOST_KEYS:
        raise UsageError(
            f"{path} has {len(keys)} lines; allowed: the API key, then the admin key if there is "
            "one"
        )
    return ServerKeys(api=keys[0], admin=keys[-1])


def _checked(key: str, where: str) -> str:
    """Return the key; reject one with a line break, which would add headers to the request."""
    if not all("!" <= character <= "~" for character in key):
        raise UsageError(f"the key in {where} has spaces or other characters that no header takes")
    return key
