from __future__ import annotations

import shutil
from pathlib import Path

from slurmrl.run import events
from slurmrl.run.paths import RunPaths


def test_events_of_all_writers_are_merged_by_time(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.mkdir()
    master, agent = events.EventWriter(paths, "master.1"), events.EventWriter(paths, "trainer.0.0")
    master.write("ready", step=0)
    agent.write("warning", signal="USR2")
    master.write("stopped", step=3)
    merged = events.read_all(paths)
    assert [(event["writer"], event["kind"]) for event in merged] == [
        ("master.1", "ready"),
        ("trainer.0.0", "warning"),
        ("master.1", "stopped"),
    ]
    assert merged[0]["step"] == 0
    assert merged[0]["time"] <= merged[1]["time"] <= merged[2]["time"]


def test_incomplete_event_is_skipped(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.events.mkdir()
    writer = events.EventWriter(paths, "master.1")
    writer.write("ready")
    with paths.event_file("master.1").open("ab") as file:
        file.write(b'{"time": 1\n{"time"')
    assert [event["kind"] for event in events.read_all(paths)] == ["ready"]


def test_no_events_are_read_before_the_first_event(tmp_path: Path) -> None:
    assert events.read_all(RunPaths(tmp_path)) == []


def test_events_are_written_after_their_directory_was_removed(tmp_path: Path) -> None:
    """A reader that follows sees them, although their file is shorter than the one before."""
    paths = RunPaths(tmp_path / "trial")
    paths.events.mkdir(parents=True)
    writer, reader = events.EventWriter(paths, "master.1"), events.EventReader(paths)
    for step in range(3):
        writer.write("commit", step=step)
    assert [event["step"] for event in reader.read()] == [0, 1, 2]
    shutil.rmtree(paths.events)
    writer.write("commit", step=3)
    assert [event["step"] for event in reader.read()] == [3]
    assert paths.events.stat().st_mode & 0o777 == 0o700
    assert [event["step"] for event in events.read_all(paths)] == [3]
    shutil.rmtree(paths.run)
    writer.write("commit", step=4)
    assert not paths.run.exists()
