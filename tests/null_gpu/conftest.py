"""Tests on the null GPU; without it, they are skipped."""

from __future__ import annotations

import pytest

from tests.null_gpu import device


@pytest.fixture(autouse=True)
def _null_gpu() -> None:
    if not device.present():
        pytest.skip("no null GPU in this process: scripts/test-null-gpu runs these tests on one")
