"""Publication of weight versions: the ranks' parts, then the manifest. Published versions are right
after a kill at any point.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from slurmrl.config.schema import Publish
from slurmrl.engines.base import Engine
from slurmrl.engines.host import OwnedTensors
from slurmrl.errors import StaleIncarnationError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.state import Lineage
from slurmrl.tensors.checkpoint.tensors import NUMPY_DTYPES, TensorEntry
from slurmrl.tensors.layout import TensorSpec
from slurmrl.tensors.weights.format import VersionId, part_file, version_ids
from slurmrl.tensors.weights.inventory import COMPLETE, inventory, remove
from slurmrl.tensors.weights.local_copy import VersionFiles, resolved
from slurmrl.tensors.weights.writer import VersionBits
from slurmrl.workers.master.version_publisher import Publication, VersionPublisher, remove_leftovers
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import Done, Saved, WriteVersion
from slurmrl.workers.worker.saver import VersionPart, VersionWriting
from tests.unit.weights.runs import SHAPES, Bits, changed, random_bits

RANKS = 2


def entries(bits: Bits, rank: int) -> list[TensorEntry]:
    """Return the tensors of a rank, which owns every second tensor."""

    def array(name: str) -> Any:
        return bits[name].view(NUMPY_DTYPES[SHAPES[name][0]]).reshape(SHAPES[name][1])

    return [
        TensorEntry(name, TensorSpec(SHAPES[name][1], SHAPES[name][0]), partial(array, name))
        for name in sorted(bits)[rank::RANKS]
    ]


class FakeWorkforce:
    """Ranks whose weights change with each version, and which write while the master waits."""

    def __init__(self, folder: Path, bits_of: dict[str, Bits]) -> None:
        self.folder = folder
        self.bits_of = bits_of
        self.posted: list[WriteVersion] = []
        self.errors: dict[int, str] = {}
        """A rank's report in place of its part."""
        self._bits = random_bits(len(bits_of))
        self._last: dict[int, VersionBits] = {}
        self._answers: dict[int, list[tuple[Done, Saved]]] = {}

    def post(self, order: WriteVersion) -> list[int]:
        self.posted.append(order)
        self._bits = self.bits_of[order.version] = changed(self._bits, len(self.bits_of))
        return [len(self.posted) - 1]

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        self._answers[number] = [self._write(rank, number) for rank in range(RANKS)]

    def saved(self, number: int) -> list[tuple[Done, Saved]] | None:
        return self._answers.pop(number, None)

    def _write(self, rank: int, number: int) -> tuple[Done, Saved]:
        order = self.posted[number]
        version = VersionId.parse(order.version)
        base = self._last.get(rank) if order.base is not None else None
        assert order.base == (None if base is None else base.version.name)
        own = entries(self.bits_of[order.version], rank)
        part = VersionPart(rank, version, own, base)
        self._last[rank] = part.bits()
        if rank not in self.errors:
            part.write(self.folder / order.version)
        error = self.errors.get(rank, "")
        return Done(rank=rank, seq=number, seconds=0.1), Saved(rank=rank, seq=number, error=error)


class Trial:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bits_of: dict[str, Bits] = {}
        """What the ranks had as they were told to write."""
        self.channel = FakeWorkforce(folder, self.bits_of)

    def publisher(self, incarnation: int = 1, **settings: int) -> VersionPublisher:
        """Return the publisher of an incarnation with new ranks."""
        self.channel = FakeWorkforce(self.folder, self.bits_of)
        return VersionPublisher(
            self.folder,
            cast(WorkerChannel, self.channel),
            Publish(**settings),
            range(RANKS),
            incarnation,
            10.0,
            lambda: None,
        )

    @property
    def on_disk(self) -> list[str]:
        return [version.name for version in version_ids(self.folder)]

    def check(self) -> list[str]:
        """Check that published versions have the bits of the ranks, and return the versions."""
        found = [one for one in inventory(self.folder, verify=True) if one.tensors is not None]
        with VersionFiles(self.folder) as files:
            for one in found:
                assert one.state == COMPLETE, one
                chain = files.chain(VersionId.parse(one.version))
                for name, bits in self.bits_of[one.version].items():
                    assert np.array_equal(resolved(files, chain, name), bits), (one, name)
        return [one.version for one in found]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path / "versions")


def publish(publisher: VersionPublisher, step: int, *, again: bool = False) -> Publication:
    """Publish one version from its start to its end."""
    outcome = publisher.start(step, again=again) or publisher.wait()
    assert outcome is not None
    return outcome


def test_publisher_writes_a_full_version_at_its_interval(trial: Trial) -> None:
    publisher = trial.publisher(whole_every=3, keep_whole=9)
    outcomes = [publish(publisher, step) for step in range(7)]
    bases = [None if one.base is None else one.base.step for one in outcomes]
    assert bases == [None, 0, 1, None, 3, 4, None]
    assert trial.check() == [f"{step}.1" for step in range(7)]
    assert [one.error for one in outcomes] == [None] * 7
    assert outcomes[1].bytes < outcomes[0].bytes
    assert all(0 < one.stall_s <= one.seconds for one in outcomes)


def test_old_versions_are_removed_after_enough_newer_full_versions(trial: Trial) -> None:
    publisher = trial.publisher(whole_every=2, keep_whole=2)
    for step in range(5):
        publish(publisher, step)
    assert trial.on_disk == trial.check() == ["2.1", "3.1", "4.1"]


def test_version_is_published_after_all_ranks_have_written(trial: Trial) -> None:
    publisher = trial.publisher()
    assert publisher.start(1) is None
    assert publisher.poll() is None
    assert trial.check() == []
    outcome = publisher.wait()
    assert outcome is not None
    assert trial.check() == ["1.1"]
    assert publisher.wait() is None


def test_failed_write_leaves_no_version_and_the_next_is_full(trial: Trial) -> None:
    publisher = trial.publisher()
    publish(publisher, 1)
    trial.channel.errors = {1: "cannot write x: quota"}
    assert publish(publisher, 2).error == "rank 1: cannot write x: quota"
    assert trial.on_disk == ["1.1"], "what was written goes at once"
    trial.channel.errors = {}
    assert publish(publisher, 3).base is None
    assert publish(publisher, 4).base == VersionId(3, 1)
    assert trial.check() == ["1.1", "3.1", "4.1"]


def test_unreadable_version_is_published_again(trial: Trial) -> None:
    publisher = trial.publisher()
    publish(publisher, 1)
    assert not publisher.is_lacking
    (trial.folder / "1.1" / part_file(0)).unlink()
    publisher.distrust({VersionId(1, 1)})
    assert publisher.is_lacking
    assert publish(publisher, 1, again=True).base is None
    assert not publisher.is_lacking
    assert publish(publisher, 2).base == VersionId(1, 1)
    assert trial.check() == ["1.1", "2.1"]


def test_delta_is_never_based_on_an_unreadable_version(trial: Trial) -> None:
    """Covers a published version, a version that is being written, and the next version."""
    publisher = trial.publisher()
    publish(publisher, 1)
    assert publisher.start(2) is None
    publisher.distrust({VersionId(1, 1)})
    assert not publisher.is_lacking, "one is being written"
    outcome = publisher.wait()
    assert outcome is not None
    assert outcome.base == VersionId(1, 1)
    publisher.distrust({VersionId(2, 1)})
    assert publisher.is_lacking
    assert [publish(publisher, step).base for step in (3, 4)] == [None, VersionId(3, 1)]


@pytest.mark.parametrize("what", ["failed", "removed"])
def test_missing_version_is_published_again(trial: Trial, what: str) -> None:
    publisher = trial.publisher()
    if what == "failed":
        trial.channel.errors = {1: "cannot write x: quota"}
    publish(publisher, 1)
    remove(trial.folder, VersionId(1, 1))
    assert publisher.is_lacking
    trial.channel.errors = {}
    publish(publisher, 1, again=True)
    assert not publisher.is_lacking
    assert trial.check() == ["1.1"]


@pytest.mark.parametrize("what", ["2.1", "manifest.json"])
def test_full_disk_keeps_the_older_versions(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Covers a lack of space for the directory, and for the manifest."""
    publisher = trial.publisher()
    publish(publisher, 1)
    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename"):
            patch.setattr(SystemCalls, name, full(getattr(SystemCalls, name), what))
        outcome = publish(publisher, 2)
    assert outcome.error is not None
    assert "ENOSPC" in outcome.error
    assert trial.check() == trial.on_disk == ["1.1"]
    assert publish(publisher, 3).base is None
    assert trial.check() == ["1.1", "3.1"]


def full(real: Callable[..., Any], what: str) -> Callable[..., Any]:
    """No new names ``what``."""

    def call(self: SystemCalls, *paths: Any) -> Any:
        target = next(path for path in reversed(paths) if isinstance(path, Path))
        if target.name == what:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *paths)

    return call


def test_missing_part_file_is_an_error(trial: Trial) -> None:
    publisher = trial.publisher()
    assert publisher.start(1) is None
    trial.channel.wait_saved(0, "", 0.0)
    (trial.folder / "1.1" / "part-1.json").unlink()
    outcome = publisher.poll()
    assert outcome is not None
    assert outcome.error is not None
    assert "part-1.json is missing" in outcome.error
    assert trial.on_disk == []


def test_stale_master_publishes_no_version(trial: Trial) -> None:
    def refused() -> None:
        raise StaleIncarnationError("2 is the newest")

    publisher = trial.publisher()
    publisher._permit = refused
    assert publisher.start(1) is None
    with pytest.raises(StaleIncarnationError):
        publisher.wait()
    assert trial.check() == []


def test_new_incarnation_removes_invalid_versions(trial: Trial) -> None:
    """The new incarnation continues from step 2 and removes later versions of the first one."""
    publisher = trial.publisher()
    for step in range(5):
        publish(publisher, step)
    for name in ("1.0", "2.3"):
        (trial.folder / name).mkdir()
    remove_leftovers(trial.folder, Lineage({2: None, 1: 2}), 2)
    assert trial.on_disk == ["0.1", "1.1", "2.1", "2.3"]
    assert trial.check() == ["0.1", "1.1", "2.1"]
    second = trial.publisher(2)
    assert publish(second, 2).base is None, "its ranks do not have the bits of an older version"
    assert publish(second, 3).base == VersionId(2, 2)
    assert version_ids(trial.folder)[-2].name == "3.2"
    assert trial.check() == ["0.1", "1.1", "2.1", "2.2", "3.2"]


class Parts:
    """The tensors of a rank, which change with each version."""

    def __init__(self) -> None:
        self.bits = random_bits(0)

    def take(self, storages: object) -> list[TensorEntry]:
        self.bits = changed(self.bits, 1)
        return entries(self.bits, 0)


def write(writing: VersionWriting, version: str, base: str | None, engine: object) -> list[Saved]:
    said: list[Saved] = []
    order = WriteVersion(seq=7, step=1, version=version, base=base)
    writing.write(order, cast(Engine, engine), said.append)
    writing.wait()
    return said


class FakeEngine:
    def trained_storages(self) -> dict[str, object]:
        return {}


def test_rank_writes_changed_tensors_in_a_thread(tmp_path: Path) -> None:
    writing = VersionWriting(tmp_path, 0, cast(OwnedTensors, Parts()))
    for version, base in [("1.1", None), ("2.1", "1.1"), ("3.1", None)]:
        assert write(writing, version, base, FakeEngine()) == [Saved(rank=0, seq=7)]
    sizes = [(tmp_path / name / "part-0.bin").stat().st_size for name in ("1.1", "2.1", "3.1")]
    assert sizes[1] < sizes[0] == sizes[2]
    with pytest.raises(AssertionError, match="another base"):
        write(writing, "5.1", "4.1", FakeEngine())
