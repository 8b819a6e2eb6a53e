"""A pool of rank processes for the tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(n, "module:function", *args, deadline_s=…)``: results in rank order."""
    with RankPool() as pool:
        yield pool
