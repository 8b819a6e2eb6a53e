"""What a failure is while weights are sent to a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from slurmrl.errors import RefusedError, RunFailedError, UnreadableInputError

FINAL = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""Statuses of requests that no other attempt would change."""


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
