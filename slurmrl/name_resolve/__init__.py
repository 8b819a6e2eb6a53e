"""Name stores, by which the processes of a trial find each other.

A new kind of store is one file with a `base.NameStore` and one line in `STORES`.
"""

from __future__ import annotations

from typing import Any

from slurmrl.name_resolve.base import NameStore
from slurmrl.registry import Registry

STORES = Registry(
    "name store",
    {
        "file": "slurmrl.name_resolve.file:FileNameStore",
        "memory": "slurmrl.name_resolve.memory:MemoryNameStore",
        "redis": "slurmrl.name_resolve.redis:RedisNameStore",
    },
)


def make(kind: str, **options: Any) -> NameStore:
    """Make a store of a kind in `STORES`; ``options`` go to its constructor."""
    store: NameStore = STORES.load(kind)(**options)
    return store
