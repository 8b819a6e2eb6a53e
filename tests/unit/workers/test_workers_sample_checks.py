"""Tests of samples that the master's host cannot read, or cannot read yet."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

from slurmrl.backoff import HIDDEN_PAUSES_S, OUTAGE_S
from slurmrl.rollouts.sample_files import SampleWriter
from slurmrl.run.paths import RunPaths
from slurmrl.workers.master.task_leases import LOOK_S, SampleChecks
from tests.support.faulty import Faulty
from tests.support.sample_groups import small_group

PLACE = ("rollout", 0, 0)


class Bed:
    """Two samples in separate files."""

    def __init__(self, paths: RunPaths, calls: Faulty) -> None:
        self.clock = calls.clock
        folder = paths.rollout_samples(*PLACE)
        writer = SampleWriter(folder)
        groups = [writer.write([small_group(item)])[0] for item in range(2)]
        self.samples = [replace(group, task="rollout.0.0") for group in groups]
        self.files = [folder / group.file for group in groups]
        self.checks = SampleChecks(paths, self.clock, calls=calls)
        self.checks.add(self.samples)

    def after(self, seconds: float) -> list[int]:
        """Return the items that a check finds damaged."""
        self.clock.advance(seconds)
        return [sample.item for sample, _ in self.checks.look()]

    def sound(self) -> list[int]:
        return sorted(sample.item for sample in self.checks.sound)


class Caching(Faulty):
    def caches(self, directory: Path) -> bool:
        return True


class Local(Faulty):
    def caches(self, directory: Path) -> bool:
        return not directory.exists()


def test_sample_hidden_by_a_cache_counts_as_damaged_after_a_minute(paths: RunPaths) -> None:
    """The other samples do not wait for it."""
    bed = Bed(paths, Caching())
    bed.files[0].unlink()
    assert (bed.after(0), bed.sound()) == ([], [1])
    pauses_s = list(HIDDEN_PAUSES_S)
    for pause_s in pauses_s[:-1]:
        assert bed.after(pause_s * 0.9) == bed.after(pause_s * 0.1) == []
    assert bed.after(pauses_s[-1]) == [0]
    assert (bed.after(999), bed.sound()) == ([], [1])


def test_sample_hidden_by_a_cache_is_valid_once_it_appears(paths: RunPaths) -> None:
    bed = Bed(paths, Caching())
    away = bed.files[0].rename(bed.files[0].with_name("away"))
    assert bed.after(0) == []
    away.rename(bed.files[0])
    assert (bed.after(HIDDEN_PAUSES_S[0]), bed.sound()) == ([], [0, 1])


def test_samples_are_not_damaged_while_the_directory_is_unreachable(paths: RunPaths) -> None:
    """The master does not try to read every sample."""
    calls = Faulty(0, errno.EACCES, times=10**6)
    bed = Bed(paths, calls)
    before = calls.count
    for _ in range(50):
        assert bed.after(OUTAGE_S[1]) == bed.after(0) == []
    assert calls.count - before <= 2 * 50
    calls.times = 0
    assert bed.after(OUTAGE_S[1]) == []
    bed.after(OUTAGE_S[1])
    assert bed.sound() == [0, 1]


def test_sample_check_takes_a_limited_time(paths: RunPaths) -> None:
    bed = Bed(paths, Faulty(hang_s=LOOK_S))
    assert (bed.after(0), bed.sound()) == ([], [0])
    assert (bed.after(0), bed.sound()) == ([], [0, 1])


def test_samples_without_a_waiting_step_are_forgotten(paths: RunPaths) -> None:
    bed = Bed(paths, Faulty())
    bed.files[0].unlink()
    bed.checks.keep(bed.samples[1:])
    assert (bed.after(0), bed.sound()) == ([], [1])
    bed.checks.keep([])
    assert bed.sound() == []


def test_samples_of_a_removed_directory_are_damaged_at_first_check(paths: RunPaths) -> None:
    """On a local file system, no cache hides a folder."""
    bed = Bed(paths, Local())
    shutil.rmtree(bed.files[0].parent)
    assert (bed.after(0), bed.sound()) == ([0, 1], [])


def test_samples_of_a_recreated_directory_are_damaged(paths: RunPaths) -> None:
    """While all files are missing, the kind of the file system is unknown."""
    bed = Bed(paths, Local())
    rollouts = bed.files[0].parents[2]
    shutil.rmtree(rollouts)
    assert bed.after(0) == bed.after(HIDDEN_PAUSES_S[0]) == []
    bed.files[0].parent.mkdir(parents=True)
    assert (bed.after(HIDDEN_PAUSES_S[1]), bed.sound()) == ([0, 1], [])
