"""Every test belongs to the lane of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

LANES = ("unit", "distributed", "slurm", "faults", "engines", "gpu")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = item.path.relative_to(HERE).parts[0]
        if lane not in LANES:
            raise pytest.UsageError(f"{item.path}: tests live in one of {', '.join(LANES)}")
        item.add_marker(lane)
