from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmrl.fsio.calls import SystemCalls


@pytest.fixture(autouse=True)
def _syncing_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsync do nothing. `tests.faults.test_faults_crash` tests durability."""

    def sync_directory(calls: SystemCalls, directory: Path) -> None:
        os.stat(directory)

    monkeypatch.setattr(SystemCalls, "fsync", lambda calls, descriptor: None)
    monkeypatch.setattr(SystemCalls, "fsync_directory", sync_directory)
