"""Every test belongs to the lane of its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from slurmrl import env

LANES = ("unit", "distributed", "slurm", "faults", "engines", "gpu")
HERE = Path(__file__).parent

# Whoever runs the tests may have runs of their own.
os.environ.pop(env.ROOT.name, None)

# How long an example takes says nothing on a busy machine.
settings.register_profile("slurmrl", deadline=None)
settings.load_profile("slurmrl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lane = item.path.relative_to(HERE).parts[0]
        if lane not in LANES:
            raise pytest.UsageError(f"{item.path}: tests live in one of {', '.join(LANES)}")
        item.add_marker(lane)
