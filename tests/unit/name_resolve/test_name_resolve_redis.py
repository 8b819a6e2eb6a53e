from __future__ import annotations

import sys

import pytest

from slurmrl.errors import EnvironmentFailure, MissingDependencyError
from slurmrl.name_resolve import make, redis


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingDependencyError, match=r"pip install redis"):
        make("redis", url="redis://localhost")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr(redis, "UNCLEAR_PAUSES_S", (0.01,))
    store = make("redis", url="unix:///nonexistent/redis.sock")
    for use in (store.refresh, lambda: store.get("a"), lambda: store.add("a", "1")):
        with pytest.raises(EnvironmentFailure, match="redis does not answer"):
            use()
