from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from slurmrl.errors import ReportedError, RunGoneError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.paths import RunPaths
from slurmrl.workers.polling import GONE_S, LOOK_S, Presence, make_channels


class Watched(SystemCalls):
    """A directory that may not answer, and a clock that advances during pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.error = 0
        self.looks = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def listdir(self, directory: Path) -> list[str]:
        self.looks += 1
        if self.error:
            raise OSError(self.error, "does not answer")
        return list(super().listdir(directory))


@pytest.fixture
def calls() -> Watched:
    return Watched()


@pytest.fixture
def presence(paths: RunPaths, calls: Watched) -> Presence:
    return Presence(paths, clock=lambda: calls.now, calls=calls)


def spend(presence: Presence, calls: Watched, seconds: float) -> None:
    end = calls.now + seconds
    while calls.now < end:
        presence.sleep(0.5)


def test_removed_run_directory_is_reported_after_a_delay(
    presence: Presence, calls: Watched, paths: RunPaths
) -> None:
    spend(presence, calls, 600.0)
    assert calls.looks <= 600 / LOOK_S + 1
    presence.wait()
    away = paths.run.with_name("away")
    paths.run.rename(away)
    spend(presence, calls, GONE_S / 2)
    away.rename(paths.run)
    spend(presence, calls, 600.0)
    shutil.rmtree(paths.run)
    before = calls.now
    with pytest.raises(RunGoneError, match="was removed"):
        spend(presence, calls, 600.0)
    assert calls.now - before < GONE_S + 3 * LOOK_S
    with pytest.raises(RunGoneError):
        presence.wait()


@pytest.mark.parametrize("name", ["control", "leases"])
def test_removed_channel_directories_are_recreated(
    presence: Presence, calls: Watched, paths: RunPaths, name: str
) -> None:
    shutil.rmtree(paths.run / name)
    with pytest.raises(ReportedError, match=f"{name}/ in .* was removed") as caught:
        spend(presence, calls, 600.0)
    assert caught.value.failure.cause == "environment"
    assert caught.value.failure.host == "", "no host is to blame"
    make_channels(paths)
    spend(presence, calls, 600.0)


def test_unreachable_run_directory_is_not_reported_removed(
    presence: Presence, calls: Watched
) -> None:
    calls.error = errno.ESTALE
    spend(presence, calls, 600.0)
    presence.wait()
