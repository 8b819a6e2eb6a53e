"""Scenarios: a rollout task writes and records samples; masters read samples and remove settled
ones.
"""

from __future__ import annotations

from pathlib import Path

from slurmrl.data.ledger import StoredGroup
from slurmrl.errors import CorruptFileError, SampleFileError
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.rollouts.sample_files import SampleWriter, read_group, remove_settled
from slurmrl.run.channel.message_log import LogPosition, LogReader, LogWriter
from slurmrl.run.paths import RunPaths
from slurmrl.workers.rollout_messages import RESULT_LOG, GroupsFinished
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note
from tests.support.sample_groups import small_group

BATCHES = 4
SEGMENT_BYTES = 600
"""Small, so that the log continues in a second file."""
KEPT = {1, 4}
"""Items that never become settled."""


def setup(folder: Path) -> None:
    make_private_directory(RunPaths(folder).rollouts)


def task(folder: Path, me: int, note: Note) -> None:
    """Act as an attempt of a task, which has a separate directory."""
    place = "rollout", 0, me
    paths = RunPaths(folder)
    writer = SampleWriter(paths.rollout_samples(*place))
    log = LogWriter(paths.rollout_results(*place), segment_bytes=SEGMENT_BYTES, durable=True)
    for batch in range(BATCHES):
        items = (2 * batch, 2 * batch + 1)
        stored = writer.write([small_group(item) for item in items])
        log.append(RESULT_LOG.to_json(GroupsFinished(groups=stored)))
        note(event="recorded", attempt=me, items=items)


def master(folder: Path, me: int, note: Note) -> None:
    """Read the records of the first attempt. Every second read is by a later incarnation, which
    begins at the last read position.
    """
    place = "rollout", 0, 0
    paths = RunPaths(folder)
    log, samples = paths.rollout_results(*place), paths.rollout_samples(*place)
    position, reader = LogPosition(), LogReader(log)
    needed: set[str] = set()
    for look in range(10):
        if look % 2:
            reader = LogReader(log, start=position)
        found = _groups(reader)
        position = reader.position
        for one in found:
            _check_group(samples, one)
            note(event="read", by=me, item=one.item)
        if found:
            needed |= {one.file for one in found if one.item in KEPT}
            remove_settled(samples, needed, found[-1].file)


def trainer(folder: Path, me: int, note: Note) -> None:
    """Read the groups that are neither trained nor dropped."""
    place = "rollout", 0, 0
    paths = RunPaths(folder)
    reader = LogReader(paths.rollout_results(*place))
    for _ in range(6):
        for one in _groups(reader):
            if one.item in KEPT:
                _check_group(paths.rollout_samples(*place), one)


def _groups(reader: LogReader) -> list[StoredGroup]:
    results = [RESULT_LOG.from_json(values) for values in reader.read()]
    return [one for each in results if isinstance(each, GroupsFinished) for one in each.groups]


def _check_group(samples: Path, one: StoredGroup) -> None:
    if read_group(samples, one).to_bytes() != small_group(one.item).to_bytes():
        raise ViolationError(f"other samples than were written: {one}")


def _check(folder: Path, events: list[Event]) -> None:
    paths = RunPaths(folder)
    read = [event["item"] for event in events if event["event"] == "read"]
    if read != list(range(len(read))):
        raise ViolationError(f"the masters read the items {read}")
    for attempt in {event["attempt"] for event in events if event["event"] == "recorded"}:
        told = [item for e in events if e.get("attempt") == attempt for item in e["items"]]
        place = "rollout", 0, attempt
        samples = paths.rollout_samples(*place)
        try:
            found = _groups(LogReader(paths.rollout_results(*place)))
            kept = [one for one in found if attempt or one.item in KEPT or one.item >= len(read)]
            for one in kept:
                _check_group(samples, one)
        except (CorruptFileError, SampleFileError) as error:
            raise ViolationError(f"a recorded group cannot be read: {error}") from error
        if [one.item for one in found][: len(told)] != told:
            raise ViolationError(f"recorded {told}, found {found}")
        needed = {one.file for one in kept}
        remove_settled(samples, needed, None)
        left = {path.name for path in samples.iterdir()}
        if left != needed:
            raise ViolationError(f"left over: {left}, needed {needed}")


SCENARIOS = (Scenario("samples", setup, (task, master, trainer), _check, task),)
