from __future__ import annotations

import random
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.slots import SLOT_DIGITS, History, Kind, Record, pack
from slurmrl.run.history.state import fold, recent


class Counting(SystemCalls):
    """Real calls that count opened files, on a clock that does not move."""

    def __init__(self) -> None:
        self.opened = 0

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self.opened += 1
        return super().open(path, flags, mode)

    def sleep(self, seconds: float) -> None:
        """Return at once: nothing changes meanwhile."""


class Writer:
    """Writes records without fsync, to be fast."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.count = self.incarnation = 0

    def add(self, kind: Kind, **data: object) -> None:
        self.incarnation += kind is Kind.BEGIN
        record = Record(self.count, kind, self.incarnation, float(self.count), dict(data))
        (self.directory / f"{self.count:0{SLOT_DIGITS}d}").write_bytes(pack(record, "nonce"))
        self.count += 1

    def commit(self, step: int, kind: Kind = Kind.COMMIT) -> None:
        self.add(kind, step=step, directory=f"step-{step:08d}")


def write_at_random(directory: Path, seed: int) -> None:
    """A random valid history of masters and commands."""
    choose, writer = random.Random(seed), Writer(directory)
    step, kept, ended, begun = 0, list[int](), False, False
    for _ in range(choose.randrange(60)):
        what = choose.choice(["begin", "commit", "commit", "delete", "export", "end", "resume"])
        if what == "begin" and not ended:
            writer.add(Kind.BEGIN, job=f"{writer.incarnation}.0")
            begun = True
        elif what == "commit" and begun and not ended:
            step += 1
            kept.append(step)
            writer.commit(step)
        elif what == "delete" and kept:
            writer.commit(kept.pop(choose.randrange(len(kept))), Kind.DELETE)
        elif what == "export" and kept:
            writer.commit(kept[-1], Kind.EXPORT)
        elif what == "end" and not ended:
            writer.add(choose.choice([Kind.FINISHED, Kind.FAILED, Kind.CANCELLED]))
            ended, begun = True, False
        elif what == "resume" and ended:
            writer.add(Kind.RESUME)
            ended = False


@pytest.mark.parametrize("seed", range(60))
def test_recent_history_agrees_with_the_whole_history(tmp_path: Path, seed: int) -> None:
    write_at_random(tmp_path, seed)
    records = History(tmp_path).read()
    whole, seen = fold(records), recent(tmp_path, incarnations=100)
    assert (seen.incarnation, seen.end, seen.last_commit) == (
        whole.incarnation,
        whole.end,
        whole.last_commit,
    )
    assert seen.export == (whole.exports[-1] if whole.exports else None)
    assert [one.number for one in seen.begun] == list(range(1, whole.incarnation + 1))
    for one in seen.begun:
        own = [record for record in records if record.incarnation == one.number]
        commits = [record for record in own if record.kind is Kind.COMMIT]
        ends = [record for record in own if record.kind.is_end]
        before = fold(records[: own[0].slot + 1]).last_commit
        assert (one.time, one.data) == (own[0].time, own[0].data)
        assert one.end == (ends[0] if ends else None)
        assert one.commit == (commits[-1] if commits else None)
        assert before is None or one.base is not None


def test_recent_history_is_empty_before_the_first_record(tmp_path: Path) -> None:
    assert recent(tmp_path / "none").incarnation == 0
    assert recent(tmp_path).begun == ()


@pytest.mark.parametrize("commits_each", [0, 9, 2990])
def test_recent_history_reads_few_of_many_files(tmp_path: Path, commits_each: int) -> None:
    writer = Writer(tmp_path)
    while writer.count < 3_000:
        writer.add(Kind.BEGIN)
        if not commits_each and writer.count == 1:
            writer.commit(1)
        for _ in range(commits_each):
            writer.commit(writer.count)
    calls = Counting()
    seen = recent(tmp_path, incarnations=3, exports=False, calls=calls)
    assert seen.incarnation == writer.incarnation
    assert len(seen.begun) == min(3, writer.incarnation)
    assert calls.opened < 300 if commits_each else calls.opened <= 3_002
    assert seen.last_commit is not None


def test_permanently_missing_slot_is_an_error(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.add(Kind.BEGIN)
    for step in range(1, 9):
        writer.commit(step)
    (tmp_path / f"{8:0{SLOT_DIGITS}d}").unlink()
    (tmp_path / f"{9:0{SLOT_DIGITS}d}").write_bytes(
        pack(Record(9, Kind.DELETE, 1, 0.0, {"step": 7, "directory": "step-00000007"}), "n")
    )
    with pytest.raises(CorruptFileError, match="00000008 is missing"):
        recent(tmp_path, calls=Counting())
