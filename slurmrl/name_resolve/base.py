"""The contract of name stores: one value per key; of concurrent exclusive adds one wins."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from slurmrl.errors import NameExistsError, NameNotFoundError
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import TEXT, Fields, FieldType
from slurmrl.name_resolve.names import below, checked_value, normalise, normalise_root

NONCE = FieldType("letters and digits", lambda value: isinstance(value, str) and value.isalnum())
OWNER = FieldType(
    "the name of a lease, or empty",
    lambda value: (
        isinstance(value, str)
        and value.isprintable()
        and "/" not in value
        and not value.startswith(".")
    ),
)
FIELDS: Fields = {"value": TEXT, "nonce": NONCE, "owner": OWNER}


class NameEntry(NamedTuple):
    """One value, encoded as a JSON object with these fields."""

    value: str
    nonce: str
    """Distinguishes this entry from others with the same value."""
    owner: str = ""
    """File name of the lease that the key depends on; empty for a permanent key."""

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def from_json(data: bytes, where: object) -> NameEntry:
        """Raises CorruptFileError that names ``where``."""
        subject = f"{where} is not an entry of a name store: it"
        content = documents.parse(data, subject, FIELDS, ("value", "nonce"))
        return NameEntry(content["value"], content["nonce"], content.get("owner") or "")


def nobody_dies(owner: str) -> bool:
    """Treat every owner as alive: for stores that show all keys."""
    return True


class NameStore(ABC):
    """Keys are paths like ``attempt/trainer/0/1`` (see `names` for form and limits); a key can be
    a value and a prefix of others at once. Values are strings.

    Keys added with ``delete_on_exit`` live as long as their process: `reset` deletes them. If the
    process dies first, they die with its lease (``owner`` is the file name of that lease): a store
    whose ``alive`` reports an owner as dead hides the owner's keys and lets the next add take them
    over. As a context manager a store calls `reset` on exit.
    """

    def __init__(self, *, owner: str = "", alive: Callable[[str], bool] = nobody_dies) -> None:
        self._owner = owner
        self._alive = alive
        self._added: dict[str, NameEntry] = {}
        """Keys that `reset` deletes."""

    # -- implemented by each kind of store --------------------------------------------------

    @abstractmethod
    def _add(self, key: str, entry: NameEntry, *, replace: bool, durable: bool) -> bool:
        """Store an entry; False if the key exists and ``replace`` is false."""

    @abstractmethod
    def _get(self, key: str) -> NameEntry | None: ...

    @abstractmethod
    def _keys(self, root: str) -> list[str]:
        """Return the keys below ``root`` in any order; others may be among them."""

    @abstractmethod
    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        """Replace ``old``, the entry of a dead owner, by ``new``; False if another process has done
        so. At most one of several succeeds, and the key never disappears meanwhile."""

    @abstractmethod
    def _delete(self, key: str) -> bool: ...

    @abstractmethod
    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        """Delete a key if it still holds this very entry."""

    @abstractmethod
    def refresh(self) -> None:
        """Make entries of other hosts visible that a cache may hide.

        Raises EnvironmentFailure if the store does not answer or is gone.
        """

    # -- public interface --------------------------------------------------------------------

    def add(
        self,
        name: str,
        value: object,
        *,
        replace: bool = False,
        delete_on_exit: bool = True,
        durable: bool = True,
    ) -> None:
        """Set the value of a key to ``str(value)``. Without ``durable``, a crash of the server that
        holds the key may lose or damage the value.

        Raises NameExistsError if the key exists and ``replace`` is false, InvalidNameError.
        """
        key = normalise(name)
        owner = self._owner if delete_on_exit else ""
        entry = NameEntry(checked_value(key, value), uuid.uuid4().hex, owner)
        added = self._add(key, entry, replace=replace, durable=durable)
        if not added and not self._inherit(key, entry):
            raise NameExistsError(f"key {key!r} exists already")
        if delete_on_exit:
            self._added[key] = entry
        else:
            self._added.pop(key, None)

    def get(self, name: str) -> str:
        """Return the value of a key. Raises NameNotFoundError."""
        key = normalise(name)
        entry = self._live(key)
        if entry is None:
            raise NameNotFoundError(f"no key {key!r}")
        return entry.value

    def find_subtree(self, root: str) -> list[str]:
        """Return the sorted keys: ``root`` itself and all below ``root/``; ``""`` means all."""
        keys = self._below(normalise_root(root))
        if self._alive is nobody_dies:
            return keys
        return [key for key in keys if self._live(key) is not None]

    def get_subtree(self, root: str) -> list[str]:
        """Return the values of `find_subtree`'s keys, in its order."""
        entries = (self._live(key) for key in self._below(normalise_root(root)))
        return [entry.value for entry in entries if entry is not None]

    def entries(self, root: str = "") -> dict[str, NameEntry]:
        """Return all entries below ``root`` by sorted key, including those of dead owners."""
        found = ((key, self._get(key)) for key in self._below(normalise_root(root)))
        return {key: entry for key, entry in found if entry is not None}

    def delete(self, name: str) -> None:
        """Delete a key. Raises NameNotFoundError."""
        key = normalise(name)
        self._added.pop(key, None)
        if not self._delete(key):
            raise NameNotFoundError(f"no key {key!r}")

    def reset(self) -> None:
        """Delete the keys added here with ``delete_on_exit`` and not replaced since."""
        while self._added:
            self._delete_entry(*self._added.popitem())

    def _below(self, root: str) -> list[str]:
        return sorted(key for key in self._keys(root) if below(key, root))

    def _live(self, key: str) -> NameEntry | None:
        """Return the entry of a key, unless its owner is dead."""
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
