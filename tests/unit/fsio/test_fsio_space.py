from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import calls
from slurmrl.fsio.calls import SystemCalls


class Quota(SystemCalls):
    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_space_is_checked_by_free_bytes_and_a_trial_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.require_space(tmp_path)
    calls.require_space(tmp_path / "not" / "yet")
    with pytest.raises(EnvironmentFailure, match=r"EDQUOT.*nothing was submitted"):
        calls.require_space(tmp_path, calls=Quota())
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(calls, "free_bytes", lambda directory: 5 << 20)
    with pytest.raises(EnvironmentFailure, match=r"is full: 5 MiB are free.*nothing was submitted"):
        calls.require_space(tmp_path / "not" / "yet")
