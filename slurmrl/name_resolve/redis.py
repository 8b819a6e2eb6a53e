"""Name store in a Redis server, an optional alternative to files.

A key is ``<prefix>:<key>``, its value a `NameEntry`. Redis executes commands one by one,
so SET with NX is the exclusive add, and scripts compare before they change. A server without
persistence loses all names when it restarts; the trial's history does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from slurmrl.backoff import UNCLEAR_PAUSES_S, attempts
from slurmrl.errors import EnvironmentFailure, MissingDependencyError
from slurmrl.name_resolve.base import NameEntry, NameStore, nobody_dies

T = TypeVar("T")

TIMEOUT_S = 10.0
SCAN_COUNT = 1000
"""Keys that the server scans per round of a listing."""
_DELETE_IF = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
_SWAP_IF = """
local there = redis.call('get', KEYS[1])
if there == ARGV[2] then return 1 end
if there ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2])
return 1
"""
_GLOB = str.maketrans({character: f"\\{character}" for character in "\\*?[]^"})


def _package() -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingDependencyError(
            "the redis name store needs the package redis: pip install redis"
        ) from error
    return redis


class RedisNameStore(NameStore):
    """``url`` is ``redis://[user:password@]host:port/0``, ``rediss://…`` or ``unix://path``;
    ``prefix`` separates trials. Raises EnvironmentFailure if the server does not answer."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "slurmrl",
        owner: str = "",
        alive: Callable[[str], bool] = nobody_dies,
    ) -> None:
        super().__init__(owner=owner, alive=alive)
        self._prefix = f"{prefix}:"
        self._redis = _package()
        self._client = self._redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )

    def _add(self, key: str, entry: NameEntry, *, replace: bool, durable: bool) -> bool:
        data = entry.to_json()
        added = self._ask(lambda: self._client.set(self._prefix + key, data, nx=not replace))
        # After a lost reply the entry there tells whether it was ours.
        return bool(added) or self._ask(lambda: self._client.get(self._prefix + key)) == data

    def _get(self, key: str) -> NameEntry | None:
        data = self._ask(lambda: self._client.get(self._prefix + key))
        return None if data is None else NameEntry.from_json(data, key)

    def _keys(self, root: str) -> list[str]:
        pattern = (self._prefix + root).translate(_GLOB) + "*"
        found = self._ask(lambda: set(self._client.scan_iter(match=pattern, count=SCAN_COUNT)))
        return [name.decode().removeprefix(self._prefix) for name in found]

    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        arguments = (self._prefix + key, old.to_json(), new.to_json())
        return bool(self._ask(lambda: self._client.eval(_SWAP_IF, 1, *arguments)))

    def _delete(self, key: str) -> bool:
        return bool(self._ask(lambda: self._client.delete(self._prefix + key)))

    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        self._ask(lambda: self._client.eval(_DELETE_IF, 1, self._prefix + key, entry.to_json()))

    def refresh(self) -> None:
        """Check that the server answers; nothing is cached."""
        self._ask(self._client.ping)

    def _ask(self, command: Callable[[], T]) -> T:
        """Run a command, again where the connection was lost: all commands can be repeated."""
        for last in attempts(UNCLEAR_PAUSES_S):
            try:
                return command()
            except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
                if last:
                    raise EnvironmentFailure(f"redis does not answer: {error}") from error
            except self._redis.RedisError as error:
                raise EnvironmentFailure(f"redis: {error}") from error
        raise AssertionError("unreachable: the last attempt returns or raises")
