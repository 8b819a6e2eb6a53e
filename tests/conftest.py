"""Every test gets the lane of its folder as a marker, and the longest files run first."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from slurmrl import env
from slurmrl.config.profiles import NONE

LANES = ("slurm", "distributed", "engines", "faults", "gpu", "null_gpu", "trl", "unit")
HERE = Path(__file__).parent
ONE_AT_A_TIME = "tests/engines/"
"""Folder whose files are tested one after the other in one process: a server takes gigabytes of
memory and all cores while it starts."""
LONGEST_FIRST = (
    "engines",
    "slurm/test_slurm_lost_nodes.py",
    "distributed/test_examples.py",
    "slurm/test_slurm_causes.py",
    "distributed/test_local_images.py",
    "slurm/test_slurm_faults.py",
    "distributed/test_families.py",
    "slurm/test_slurm_rollouts.py",
    "distributed/test_learning.py",
    "slurm/test_slurm_trials.py",
    "faults",
    "slurm/test_slurm_examples.py",
    "distributed/test_local_kills.py",
    "slurm/test_slurm_networks.py",
    "distributed/engines/test_engines_megatron.py",
    "distributed/test_local_hf_tasks.py",
    "distributed/test_local_hf_lora.py",
    "slurm/test_slurm_scheduler.py",
    "distributed/engines/test_engines_layouts.py",
    "slurm/test_slurm_chain.py",
    "unit/ops/test_ops_build.py",
    "distributed/engines/test_engines_transformer_engine.py",
    "slurm/test_slurm_accounting.py",
    "unit/test_docs.py",
    "unit/test_site.py",
)
"""Files and folders. A process takes the next file when it has finished one, so files that take
minutes must not come last. Files that wait are between files that compute. Next are the other files
with long tests, then files without, both in the order of LANES."""

# The user who runs the tests may have other runs and a site profile.
os.environ.pop(env.ROOT.name, None)
os.environ[env.PROFILE.name] = NONE

# On a busy machine, the time of an example means nothing. Every run has the same examples, so that
# failures are reproducible. Examples share fixtures on purpose.
settings.register_profile(
    "slurmrl",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("slurmrl")


STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long-s",
        type=float,
        metavar="S",
        help="skip long tests that would begin later than S seconds after the start",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # Run before any fixture.
def pytest_runtest_setup(item: pytest.Item) -> None:
    # The numbers of a test must not depend on the tests before it.
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    limit_s = item.config.getoption("long_s")
    if limit_s is None or item.get_closest_marker("long") is None:
        return
    if time.monotonic() - item.config.stash[STARTED] > limit_s:
        # pytest shows skips of one place and reason as one line
        pytest.skip(f"{item.nodeid}: long tests begin within {limit_s:.0f} s here (--long-s)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gone = [name for name in LONGEST_FIRST if not (HERE / name).exists()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST_FIRST names nothing: {gone}")
    for item in items:
        lane = item.path.relative_to(HERE).parts[0]
        if lane not in LANES:
            raise pytest.UsageError(f"{item.path}: tests live in one of {', '.join(LANES)}")
        item.add_marker(lane)
        if item.get_closest_marker("long"):
            item.user_properties.append(("long", True))  # for .ci/check-lanes
    of_run = (item for item in items if not item.get_closest_marker("soak"))
    long = {item.path for item in of_run if item.get_closest_marker("long")}
    items.sort(key=lambda item: _place(item, long))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneServerAtATime(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ONE_AT_A_TIME):
                return ONE_AT_A_TIME
            return str(super()._split_scope(nodeid))

    return OneServerAtATime(config, log)


def _place(item: pytest.Item, long: set[Path]) -> tuple[int, bool, int, str]:
    path = item.path.relative_to(HERE)
    places = (place for place, name in enumerate(LONGEST_FIRST) if path.is_relative_to(name))
    place = next(places, len(LONGEST_FIRST))
    return place, item.path not in long, LANES.index(path.parts[0]), str(path)
