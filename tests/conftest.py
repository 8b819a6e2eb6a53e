"""Every test belongs to the lane of its folder, and the longest files come first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from slurmrl import env

LANES = ("slurm", "distributed", "engines", "faults", "gpu", "null_gpu", "trl", "unit")
HERE = Path(__file__).parent
LONGEST_FIRST = (
    "slurm/test_slurm_causes.py",
    "distributed/test_local_kills.py",
    "faults/test_faults_kills.py",
    "slurm/test_slurm_scheduler.py",
    "distributed/engines/test_engines_layouts.py",
    "slurm/test_slurm_chain.py",
    "unit/ops/test_ops_build.py",
    "slurm/test_slurm_trials.py",
    "distributed/engines/test_engines_transformer_engine.py",
    "slurm/test_slurm_accounting.py",
    "slurm/test_slurm_networks.py",
)
"""A process takes the next file when it has done one, so what takes minutes must not come last. The
others follow in the order of LANES; those that wait lie among those that compute."""

# Whoever runs the tests may have runs of their own.
os.environ.pop(env.ROOT.name, None)

# How long an example takes says nothing on a busy machine.
settings.register_profile("slurmrl", deadline=None)
settings.load_profile("slurmrl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gone = [name for name in LONGEST_FIRST if not (HERE / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST_FIRST names no file: {gone}")
    for item in items:
        lane = item.path.relative_to(HERE).parts[0]
        if lane not in LANES:
            raise pytest.UsageError(f"{item.path}: tests live in one of {', '.join(LANES)}")
        item.add_marker(lane)
        if item.get_closest_marker("long"):
            item.user_properties.append(("long", True))  # for .ci/check-lanes
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int, str]:
    path = item.path.relative_to(HERE)
    longest = LONGEST_FIRST.index(str(path)) if str(path) in LONGEST_FIRST else len(LONGEST_FIRST)
    return longest, LANES.index(path.parts[0]), str(path)
