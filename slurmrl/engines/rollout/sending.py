"""What a server has, and what a failure is, while weights are sent to it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from slurmrl.errors import RefusedError, RunFailedError, UnreadableInputError

FINAL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""Statuses of requests that no other attempt would change."""


def in_part() -> str:
    """What a server is to call its weights while they are replaced: if that breaks off, no run
    takes them for those of a version."""
    return f"in part ({secrets.token_hex(8)})"


@contextmanager
def one_attempt(where: str) -> Iterator[None]:
    """To send weights to the server ``where``. Raises RunFailedError for what goes wrong, unless
    another attempt would be in vain."""
    try:
        yield
    except RunFailedError:
        raise
    except RefusedError as error:
        if error.status in FINAL:
            raise
        raise RunFailedError(str(error)) from error
    except (UnreadableInputError, MemoryError, RuntimeError, OSError) as error:
        raise RunFailedError(f"{where}: {error}") from error
