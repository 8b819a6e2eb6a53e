"""The contract of name stores: a key has one value; of concurrent exclusive adds one wins."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from slurmrl.errors import NameExistsError, NameNotFoundError
from slurmrl.name_resolve.names import below, checked_value, normalise, normalise_root


class NameEntry(NamedTuple):
    value: str
    nonce: str
    """Tells this entry from others with the same value."""
    owner: str = ""
    """File name of the lease that the key lives and dies with; empty for a key that stays."""


def nobody_dies(owner: str) -> bool:
    """For stores that do not judge owners: all of their keys are shown."""
    return True


class NameStore(ABC):
    """Keys are paths like ``attempt/trainer/0/1`` (see `names` for form and limits); a key can be
    a value and a prefix of others at once. Values are strings.

    What a store adds with ``delete_on_exit`` goes with its process: it is deleted at `reset`, and
    if the process dies before, with its lease: ``owner`` is that lease's file name, and stores
    whose ``alive`` says that an owner is dead show none of its keys, and give them to whoever
    adds them next. As a context manager a store calls `reset` at its end.
    """

    def __init__(self, *, owner: str = "", alive: Callable[[str], bool] = nobody_dies) -> None:
        self._owner = owner
        self._alive = alive
        self._added: dict[str, NameEntry] = {}
        """What to delete at `reset`."""

    # -- what an implementation offers -------------------------------------------------------

    @abstractmethod
    def _add(self, key: str, entry: NameEntry, replace: bool) -> bool:
        """Store an entry; False if the key exists and ``replace`` is false."""

    @abstractmethod
    def _get(self, key: str) -> NameEntry | None: ...

    @abstractmethod
    def _keys(self, root: str) -> list[str]:
        """Keys below ``root``, in any order; others may be among them."""

    @abstractmethod
    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        """Put ``new`` in the place of ``old``, the entry of a dead owner; False if somebody else
        has done so. Of several at most one succeeds, and the key is there all the time."""

    @abstractmethod
    def _delete(self, key: str) -> bool: ...

    @abstractmethod
    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        """Delete a key if it still holds this very entry."""

    @abstractmethod
    def refresh(self) -> None:
        """Make entries of other hosts visible that a cache may still hide.

        Raises EnvironmentFailure where the store does not answer or is gone.
        """

    # -- what everybody uses -----------------------------------------------------------------

    def add(
        self, name: str, value: object, *, replace: bool = False, delete_on_exit: bool = True
    ) -> None:
        """Give a key its value, ``str(value)``.

        Raises NameExistsError if the key exists and ``replace`` is false, InvalidNameError.
        """
        key = normalise(name)
        owner = self._owner if delete_on_exit else ""
        entry = NameEntry(checked_value(key, value), uuid.uuid4().hex, owner)
        if not self._add(key, entry, replace) and not self._inherit(key, entry):
            raise NameExistsError(f"key {key!r} exists already")
        if delete_on_exit:
            self._added[key] = entry
        else:
            self._added.pop(key, None)

    def get(self, name: str) -> str:
        """The value of a key. Raises NameNotFoundError."""
        key = normalise(name)
        entry = self._live(key)
        if entry is None:
            raise NameNotFoundError(f"no key {key!r}")
        return entry.value

    def find_subtree(self, root: str) -> list[str]:
        """Sorted keys: ``root`` itself and all below ``root/``; ``""`` means all."""
        keys = self._below(normalise_root(root))
        if self._alive is nobody_dies:
            return keys
        return [key for key in keys if self._live(key) is not None]

    def get_subtree(self, root: str) -> list[str]:
        """The values of `find_subtree`'s keys, in its order."""
        entries = (self._live(key) for key in self._below(normalise_root(root)))
        return [entry.value for entry in entries if entry is not None]

    def entries(self, root: str = "") -> dict[str, NameEntry]:
        """All that is stored below ``root``, by key in order, dead owners' keys included."""
        found = ((key, self._get(key)) for key in self._below(normalise_root(root)))
        return {key: entry for key, entry in found if entry is not None}

    def delete(self, name: str) -> None:
        """Delete a key. Raises NameNotFoundError."""
        key = normalise(name)
        self._added.pop(key, None)
        if not self._delete(key):
            raise NameNotFoundError(f"no key {key!r}")

    def reset(self) -> None:
        """Delete what this object added with ``delete_on_exit`` and nobody has replaced since."""
        while self._added:
            self._delete_entry(*self._added.popitem())

    def _below(self, root: str) -> list[str]:
        return sorted(key for key in self._keys(root) if below(key, root))

    def _live(self, key: str) -> NameEntry | None:
        """The entry of a key, unless its owner is dead."""
        entry = self._get(key)
        return entry if entry is not None and self._lives(entry) else None

    def _lives(self, entry: NameEntry) -> bool:
        return not entry.owner or self._alive(entry.owner)

    def _inherit(self, key: str, entry: NameEntry) -> bool:
        """Take over the key of a dead owner."""
        there = self._get(key)
        return there is not None and not self._lives(there) and self._swap(key, there, entry)

    def __enter__(self) -> NameStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()
