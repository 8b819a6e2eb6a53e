"""A fake scheduler in place of the real ones."""

from __future__ import annotations

import pytest

from slurmrl.desk import handle, proposal, submitting, trial_jobs
from tests.fake_runs import FakeScheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    fake = FakeScheduler()
    for module in (handle, trial_jobs, proposal, submitting):
        monkeypatch.setattr(module, "make", lambda kind: fake)
    monkeypatch.delenv("SLURMRL_ROOT", raising=False)
    return fake
