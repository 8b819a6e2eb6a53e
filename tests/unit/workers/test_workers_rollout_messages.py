"""Requests to rollout tasks and their results, which both ends check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import CorruptFileError
from slurmrl.rollouts.sample_files import SampleWriter, read_group
from slurmrl.run.channel import message_log
from slurmrl.run.channel.message_log import LogPosition, LogReader, LogWriter
from slurmrl.run.paths import RunPaths
from slurmrl.workers.rollout_messages import (
    RESULT_LOG,
    GroupsFinished,
)
from tests.support.sample_groups import small_group

STORED = StoredGroup(
    item=5, lease="1.7", file="0.samples", offset=8, length=9, checksum="xxh3_128:0",
    versions=("4.1", "5.1"),
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"versions": []},
        {"versions": ["5.1", "4.1"]},
        {"versions": ["5.1", "5.1"]},
        {"file": "../other"},
        {"lease": ""},
        {"offset": -1},
        {"checksum": "md5:0"},
    ],
)
def test_invalid_rollout_records_are_rejected(change: dict[str, Any]) -> None:
    [values], _ = message_log.decode(
        message_log.encode(RESULT_LOG.to_json(GroupsFinished(groups=(STORED,))))
    )
    values["groups"] = [{**values["groups"][0], **change}]
    with pytest.raises(CorruptFileError, match="'groups'"):
        RESULT_LOG.from_json(values)


def test_later_master_continues_reading_at_the_committed_position(tmp_path: Path) -> None:
    """Also covers a later file of the log."""
    paths = RunPaths(tmp_path)
    place = "rollout", 0, 2
    writer = SampleWriter(paths.rollout_samples(*place))
    log = LogWriter(paths.rollout_results(*place), segment_bytes=300)
    first = LogReader(paths.rollout_results(*place))
    positions = [first.position]
    for item in range(6):
        stored = writer.write([small_group(item)])
        log.append(RESULT_LOG.to_json(GroupsFinished(groups=stored)))
        first.read()
        positions.append(first.position)
    assert positions[0] == LogPosition()
    assert positions[-1].segment > 1
    for done, position in enumerate(positions):
        late = LogReader(paths.rollout_results(*place), start=position)
        results = [RESULT_LOG.from_json(values) for values in late.read()]
        found = [one for each in results if isinstance(each, GroupsFinished) for one in each.groups]
        assert [one.item for one in found] == list(range(done, 6))
        assert all(read_group(paths.rollout_samples(*place), one).item == one.item for one in found)
        assert late.position == positions[-1]


def test_log_reader_stays_before_a_damaged_message(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log")
    reader = LogReader(tmp_path / "log")
    log.append({"n": 0})
    assert reader.read() == [{"n": 0}]
    before = reader.position
    with (tmp_path / "log").open("ab") as file:
        file.write(message_log.encode({"n": 1})[:-1])
    assert reader.read() == []
    assert reader.position == before
