"""The contract of name stores: a key has one value; of concurrent exclusive adds one wins."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from slurmrl.backoff import Backoff
from slurmrl.errors import NameExistsError, NameNotFoundError, WaitTimeoutError
from slurmrl.name_resolve.names import below, checked_value, normalise, normalise_root
from slurmrl.name_resolve.watch import Watch

POLL_GROWTH = 25
"""A long wait looks at most this much less often than a fresh one."""
REFRESH_S = 1.0
"""How often a wait asks the store to look past its caches."""


class Entry(NamedTuple):
    value: str
    nonce: str
    """Tells this entry from others with the same value."""


class NameStore(ABC):
    """Keys are paths like ``attempt/trainer/0/1`` (see `names` for form and limits); a key can be
    a value and a prefix of others at once. Values are strings.

    As a context manager a store deletes at its end what it added (see `reset`).
    """

    def __init__(self) -> None:
        self._added: dict[str, Entry] = {}
        """What to delete at `reset`."""

    # -- what an implementation offers -------------------------------------------------------

    @abstractmethod
    def _add(self, key: str, entry: Entry, replace: bool) -> bool:
        """Store an entry; False if the key exists and ``replace`` is false."""

    @abstractmethod
    def _get(self, key: str) -> str | None: ...

    @abstractmethod
    def _keys(self) -> list[str]: ...

    @abstractmethod
    def _delete(self, key: str) -> bool: ...

    @abstractmethod
    def _delete_entry(self, key: str, entry: Entry) -> None:
        """Delete a key if it still holds this very entry."""

    @abstractmethod
    def refresh(self) -> None:
        """Make entries of other hosts visible that a cache may still hide."""

    # -- what everybody uses -----------------------------------------------------------------

    def add(
        self, name: str, value: object, *, replace: bool = False, delete_on_exit: bool = True
    ) -> None:
        """Give a key its value, ``str(value)``.

        Raises NameExistsError if the key exists and ``replace`` is false, InvalidNameError.
        """
        key = normalise(name)
        entry = Entry(checked_value(key, value), uuid.uuid4().hex)
        if not self._add(key, entry, replace):
            raise NameExistsError(f"key {key!r} exists already")
        if delete_on_exit:
            self._added[key] = entry
        else:
            self._added.pop(key, None)

    def add_subentry(self, name: str, value: object, *, delete_on_exit: bool = True) -> str:
        """Add a value under a new key ``name/<8 hexadecimal digits>``, which is returned."""
        while True:
            key = f"{normalise(name)}/{uuid.uuid4().hex[:8]}"
            try:
                self.add(key, value, delete_on_exit=delete_on_exit)
            except NameExistsError:
                continue
            return key

    def get(self, name: str) -> str:
        """The value of a key. Raises NameNotFoundError."""
        key = normalise(name)
        value = self._get(key)
        if value is None:
            raise NameNotFoundError(f"no key {key!r}")
        return value

    def find_subtree(self, root: str) -> list[str]:
        """Sorted keys: ``root`` itself and all below ``root/``; ``""`` means all."""
        root = normalise_root(root)
        return sorted(key for key in self._keys() if below(key, root))

    def get_subtree(self, root: str) -> list[str]:
        """The values of `find_subtree`'s keys, in its order."""
        values = (self._get(key) for key in self.find_subtree(root))
        return [value for value in values if value is not None]

    def wait(self, name: str, *, timeout_s: float | None, poll_s: float = 0.02) -> str:
        """The value of a key, as soon as it is there.

        Looks every ``poll_s`` at first and less often the longer it takes. ``timeout_s`` of zero
        or less means one look, None no limit. Raises WaitTimeoutError.
        """
        key = normalise(name)
        backoff = Backoff(poll_s, poll_s * POLL_GROWTH)
        start = refreshed = time.monotonic()
        while (value := self._get(key)) is None:
            now = time.monotonic()
            if timeout_s is not None and now - start >= timeout_s:
                raise WaitTimeoutError(f"waited {max(timeout_s, 0):g} s for key {key!r}")
            if now - refreshed >= REFRESH_S:
                self.refresh()
                refreshed = now
            left_s = start + timeout_s - now if timeout_s is not None else float("inf")
            time.sleep(min(backoff.next_s(), left_s))
        return value

    def watch_names(
        self,
        names: str | Sequence[str],
        callback: Callable[[], object],
        *,
        poll_s: float = 1.0,
        wait_timeout_s: float = 300.0,
    ) -> Watch:
        """Call ``callback`` once, in a thread of its own, after the last of ``names`` has gone.

        A name that has not appeared within ``wait_timeout_s`` counts as gone. A store that does
        not answer proves nothing: it is asked again.
        """
        keys = [normalise(name) for name in ([names] if isinstance(names, str) else names)]
        watch = Watch(lambda key: self._get(key) is not None, keys, callback)
        watch.start(poll_s, wait_timeout_s)
        return watch

    def delete(self, name: str) -> None:
        """Delete a key. Raises NameNotFoundError."""
        key = normalise(name)
        self._added.pop(key, None)
        if not self._delete(key):
            raise NameNotFoundError(f"no key {key!r}")

    def clear_subtree(self, root: str) -> None:
        """Delete ``root`` and all below it, as far as they are there."""
        for key in self.find_subtree(root):
            self._added.pop(key, None)
            self._delete(key)

    def reset(self) -> None:
        """Delete what this object added with ``delete_on_exit`` and nobody has replaced since."""
        while self._added:
            self._delete_entry(*self._added.popitem())

    def __enter__(self) -> NameStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()
